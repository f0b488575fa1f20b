"""The three commands: `run` makes load, `plot` draws a report, `compare` compares several.

Exit status: 0 done; 1 no request succeeded, or a threshold of `compare` is broken; 2 bad input or
no server, with one sentence on stderr; 130 stopped by a signal (the report is still written).
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.config import Outputs, parse_run
from loadgen.errors import UsageError
from loadgen.options import EXIT_BAD_INPUT, build_parser
from loadgen.report.compare import Comparison, as_json, compare, parse_threshold
from loadgen.report.files import (
    check_destination,
    check_plot_destination,
    read_report,
    write_bytes,
    write_json,
    write_text,
)
from loadgen.report.sidebyside import Section, as_rows, differences, side_by_side, switch_lines
from loadgen.report.tables import (
    comparison_table,
    run_table,
    side_by_side_markdown,
    side_by_side_table,
    turns_table,
)
from loadgen.runner import run_load

EXIT_OK, EXIT_FAILED, EXIT_STOPPED = 0, 1, 130
MAX_COMPARED = 8
"""Most reports in one comparison; a picture has no more colours."""


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit status."""
    args = build_parser().parse_args(arguments)
    commands = {"run": _run, "plot": _plot, "compare": _compare}
    try:
        return commands[args.command](args, arguments)
    except UsageError as error:
        sys.stderr.write(f"loadgen: {error}\n")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("loadgen: stopped before the first request.\n")
        return EXIT_STOPPED


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    config = parse_run(args)
    check_destination(config.outputs.report, "--out")
    check_plot_destination(config.outputs.plot, "--plot")
    if args.admin_key_env is not None and config.admin_url is None:
        raise UsageError("--admin-key-env goes with --admin-url.")
    headers = _auth_headers("--api-key-env", args.api_key_env)
    admin_headers = _auth_headers("--admin-key-env", args.admin_key_env)
    outcome = asyncio.run(run_load(config, headers, admin_headers))
    report: dict[str, Any] = {
        **outcome,
        "command": ["python", "-m", "loadgen", *arguments],
        "config": {name: _plain(value) for name, value in sorted(vars(args).items())},
    }
    _deliver(report, config.outputs)
    if report["interrupted"]:
        return EXIT_STOPPED
    return EXIT_OK if report["total"]["requests"]["ok"] else EXIT_FAILED


def _plot(args: argparse.Namespace, _arguments: Sequence[str]) -> int:
    check_plot_destination(args.out, "--out")
    report = read_report(args.report)
    with _whole_reports(args.report):
        _draw(report, args.out)
    return EXIT_OK


def _compare(args: argparse.Namespace, _arguments: Sequence[str]) -> int:
    check_destination(args.json, "--json")
    check_destination(args.markdown, "--markdown")
    check_plot_destination(args.plot, "--plot")
    names = _names(args)
    thresholds = [parse_threshold(text) for text in args.fail_if]
    reports = [read_report(path) for path in args.reports]
    with _whole_reports(*args.reports):
        first, *others = reports
        comparisons = [
            compare(first, other, scope=args.scope, thresholds=thresholds) for other in others
        ]
        pairs = [(names[0], name) for name in names[1:]]
        sections = side_by_side(reports, names)
        notes = [*switch_lines(reports, names), *differences(reports, names)]
        picture = None if args.plot is None else _drawn_runs(reports, names, args.plot)
    if picture is not None:
        write_bytes(args.plot, picture)
    if args.json is not None:
        write_json(args.json, _comparisons_as_json(comparisons, pairs, sections, notes))
    if args.markdown is not None:
        write_text(args.markdown, side_by_side_markdown(sections, notes))
    console = Console()
    if len(pairs) == 1:
        console.print(comparison_table(comparisons[0], pairs[0]))
    console.print(side_by_side_table(sections))
    for note in notes:
        console.print(note, markup=False, highlight=False)
    broken = [
        f"broken: {sentence}" if len(pairs) == 1 else f"broken by {name}: {sentence}"
        for comparison, (_, name) in zip(comparisons, pairs, strict=True)
        for sentence in comparison.broken
    ]
    for sentence in broken:
        console.print(sentence, style="red", markup=False, highlight=False)
    return EXIT_FAILED if broken else EXIT_OK


def _names(args: argparse.Namespace) -> list[str]:
    """Return the reports' names: those given, else their files' stems."""
    paths = args.reports
    if len(paths) < 2:
        raise UsageError("compare needs at least two reports.")
    if len(paths) > MAX_COMPARED:
        raise UsageError(f"{len(paths)} reports are more than the limit of {MAX_COMPARED}.")
    names = args.names or [path.stem for path in paths]
    if len(names) != len(paths):
        raise UsageError(f"--names needs {len(paths)} names for {len(paths)} reports.")
    return list(names)


def _comparisons_as_json(
    comparisons: Sequence[Comparison],
    pairs: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    notes: Sequence[str],
) -> dict[str, object]:
    return {
        "schema": "aileron.loadgen.comparison",
        "schema_version": 3,
        "comparisons": [as_json(*each) for each in zip(comparisons, pairs, strict=True)],
        "side_by_side": as_rows(sections),
        "notes": list(notes),
    }


def _drawn_runs(reports: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> bytes:
    from loadgen.report.overlay import draw_runs

    return draw_runs(reports, names, path.suffix.lower().removeprefix("."))


def _deliver(report: Mapping[str, Any], outputs: Outputs) -> None:
    """Write, draw and show a report; the file comes first, because it cannot be made again."""
    if outputs.report is not None:
        write_json(outputs.report, report)
    if outputs.plot is not None:
        _draw(report, outputs.plot)
    if outputs.quiet:
        return
    console = Console()
    console.print(run_table(report))
    if (turns := turns_table(report)) is not None:
        console.print(turns)
    errors = report["total"]["error_codes"]
    for code, count in errors.items():
        console.print(f"{count} x {code}", style="red", markup=False, highlight=False)
    for sentence in report["warnings"]:
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False)


def _draw(report: Mapping[str, Any], path: Path) -> None:
    from loadgen.report.plot import draw_report

    write_bytes(path, draw_report(report, path.suffix.lower().removeprefix(".")))


@contextmanager
def _whole_reports(*paths: Path) -> Iterator[None]:
    """Report in one sentence a file that has a report's head but not its body."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        files = " or ".join(str(path) for path in paths)
        raise UsageError(f"{files} is not a whole report: {error!r}.") from error


def _auth_headers(option: str, variable: str | None) -> dict[str, str]:
    """Return the header with the API key, which comes from the environment, never from a report."""
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"{option} names {variable}, but that variable is not set.")
    return {"Authorization": f"Bearer {key}"}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value

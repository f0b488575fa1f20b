"""The three commands: `run` makes load, `plot` draws a report, `compare` judges two.

Exit status: 0 done; 1 no request succeeded, or a threshold of `compare` is broken; 2 bad input
or no server, with one sentence on stderr; 130 stopped by a signal (the report is still written).
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

from loadgen.compare import as_json, compare, parse_threshold
from loadgen.config import Outputs, parse_run
from loadgen.errors import UsageError
from loadgen.files import (
    check_destination,
    check_plot_destination,
    read_report,
    write_bytes,
    write_json,
)
from loadgen.options import EXIT_BAD_INPUT, build_parser
from loadgen.runner import run_load
from loadgen.tables import comparison_table, run_table

EXIT_OK, EXIT_FAILED, EXIT_STOPPED = 0, 1, 130


def main(arguments: Sequence[str]) -> int:
    """Carry out one command line and return the exit status."""
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
    measured = asyncio.run(run_load(config, _auth_headers(args.api_key_env)))
    report: dict[str, Any] = {
        **measured,
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
    thresholds = [parse_threshold(text) for text in args.fail_if]
    first, second = read_report(args.a), read_report(args.b)
    names = args.names or (args.a.stem, args.b.stem)
    with _whole_reports(args.a, args.b):
        comparison = compare(first, second, scope=args.scope, thresholds=thresholds)
    console = Console()
    console.print(comparison_table(comparison, names))
    if args.json is not None:
        write_json(args.json, as_json(comparison, names))
    for sentence in comparison.broken:
        console.print(f"broken: {sentence}", style="red", markup=False, highlight=False)
    return EXIT_FAILED if comparison.broken else EXIT_OK


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
    errors = report["total"]["error_codes"]
    for code, count in errors.items():
        console.print(f"{count} x {code}", style="red", markup=False, highlight=False)
    for sentence in report["warnings"]:
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False)


def _draw(report: Mapping[str, Any], path: Path) -> None:
    from loadgen.plot import draw_report

    write_bytes(path, draw_report(report, path.suffix.lower().removeprefix(".")))


@contextmanager
def _whole_reports(*paths: Path) -> Iterator[None]:
    """Say in one sentence that a file with a report's head does not have a report's body."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        files = " or ".join(str(path) for path in paths)
        raise UsageError(f"{files} is not a whole report: {error!r}.") from error


def _auth_headers(variable: str | None) -> dict[str, str]:
    """The header with the API key, which comes from the environment and never into a report."""
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"--api-key-env names {variable}, but that variable is not set.")
    return {"Authorization": f"Bearer {key}"}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value

"""Terminal tables of a report and of a comparison. Pure: dictionaries in, rich tables out.

A dash, never 0, stands for a number without a measurement.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from loadgen.report.compare import Comparison, Row
from loadgen.report.sidebyside import COLUMNS, Section, best_of

RUN_COLUMNS = (
    ("sent", ("requests", "sent")),
    ("failed", ("requests", "failed")),
    ("req/s", ("throughput", "requests_per_s")),
    ("tok/s", ("throughput", "output_tokens_per_s")),
    ("TTFT\np50", ("ttft_ms", "p50")),
    ("TTFT\np99", ("ttft_ms", "p99")),
    ("TPOT\np50", ("tpot_ms", "p50")),
    ("chunk\ngap max", ("max_chunk_gap_ms", "max")),
    ("good", ("goodput", "good_share")),
)


def run_table(report: Mapping[str, Any]) -> Table:
    """Return phases, tiers and the total of one report, one row each; latencies in milliseconds."""
    server = report["server"]
    title = f"{server['model']} at {server['url']}, {report['duration_s']:.1f} s, times in ms"
    table = Table(title=escape(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading, _ in RUN_COLUMNS:
        table.add_column(heading, justify="right", vertical="bottom")
    phases = report["phases"] if len(report["phases"]) > 1 else []
    for phase in phases:
        table.add_row(phase["name"], *_cells(phase))
    for tier, part in report["tiers"].items():
        table.add_row(tier, *_cells(part))
    table.add_row("total", *_cells(report["total"]), style="bold")
    return table


def turns_table(report: Mapping[str, Any]) -> Table | None:
    """Return one row for each turn of the sessions, latencies in ms; None without sessions."""
    sessions = report["sessions"]
    if sessions is None:
        return None
    title = f"{sessions['finished']} of {sessions['planned']} sessions finished, by turn"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("turn", "sent", "prompt tokens", "TTFT p50", "TTFT p99"):
        table.add_column(heading, justify="right")
    for turn in sessions["by_turn"]:
        ttft = turn["ttft_ms"]
        cells = (
            turn["turn"],
            turn["requests"],
            turn["prompt_tokens_mean"],
            ttft["p50"],
            ttft["p99"],
        )
        table.add_row(*map(number, cells))
    return table


def comparison_table(comparison: Comparison, names: Sequence[str]) -> Table:
    """Return every metric that is not 0 in at least one report, and always `failed`."""
    title = f"{names[1]} against {names[0]} ({comparison.scope})"
    table = Table(title=escape(title), box=SIMPLE_HEAD)
    table.add_column("metric")
    for heading in (*names, f"{names[1]} / {names[0]}"):
        table.add_column(escape(heading), justify="right")
    for row in comparison.rows:
        if row.first or row.second or row.metric == "failed":
            table.add_row(row.metric, number(row.first), number(row.second), _ratio(row))
    return table


def side_by_side_table(sections: Sequence[Section]) -> Table:
    """Return the numbers of several runs, slice by slice, the best of each column in green."""
    table = Table(title="times in ms", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.heading, justify="right", vertical="bottom")
    for section in sections:
        table.add_row(escape(section.name), style="bold")
        best = best_of(section)
        for line in section.lines:
            cells = [
                f"[green]{number(value)}[/green]"
                if value is not None and value == top
                else number(value)
                for value, top in zip(line.values, best, strict=True)
            ]
            table.add_row(f"  {escape(line.run)}", *cells)
    return table


def side_by_side_markdown(sections: Sequence[Section], notes: Sequence[str]) -> str:
    """Return the same as Markdown: one table for each slice, and the notes below as a list."""
    headings = [column.heading.replace("\n", " ") for column in COLUMNS]
    lines = ["Times in milliseconds; the best of each column in bold."]
    for section in sections:
        lines += ["", f"**{section.name}**", "", _markdown_row(["run", *headings])]
        lines.append(_markdown_row(["---", *["---:"] * len(headings)]))
        best = best_of(section)
        for line in section.lines:
            cells = [
                f"**{number(value)}**" if value is not None and value == top else number(value)
                for value, top in zip(line.values, best, strict=True)
            ]
            lines.append(_markdown_row([line.run, *cells]))
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    plain = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(plain)} |"


def number(value: float | None) -> str:
    """Return a number in its shortest readable form, or a dash."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cells(part: Mapping[str, Any]) -> list[str]:
    return [number(part[group][key]) for _, (group, key) in RUN_COLUMNS]


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    colour = {True: "green", False: "red", None: "default"}[row.second_is_better]
    return f"[{colour}]{row.ratio:.3f}[/{colour}]"

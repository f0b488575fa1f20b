"""Terminal tables of a report and of a comparison. Pure: dictionaries in, rich tables out.

Numbers that were not seen are shown as a dash, never as 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from loadgen.compare import Comparison, Row

RUN_COLUMNS = (
    ("sent", ("requests", "sent")),
    ("ok", ("requests", "ok")),
    ("failed", ("requests", "failed")),
    ("req/s", ("throughput", "requests_per_s")),
    ("tok/s", ("throughput", "output_tokens_per_s")),
    ("TTFT p50", ("ttft_ms", "p50")),
    ("p99", ("ttft_ms", "p99")),
    ("TPOT p50", ("tpot_ms", "p50")),
    ("p99", ("tpot_ms", "p99")),
    ("gap max", ("max_gap_ms", "max")),
    ("E2E p50", ("e2e_ms", "p50")),
    ("good", ("goodput", "good_share")),
)


def run_table(report: Mapping[str, Any]) -> Table:
    """Phases, tiers and the total of one report, one row each; latencies in milliseconds."""
    server = report["server"]
    table = Table(title=f"{server['model']} at {server['url']}, {report['duration_s']:.1f} s")
    table.add_column("slice")
    for title, _ in RUN_COLUMNS:
        table.add_column(title, justify="right")
    phases = report["phases"] if len(report["phases"]) > 1 else []
    for phase in phases:
        table.add_row(phase["name"], *_cells(phase))
    for tier, part in report["tiers"].items():
        table.add_row(f"tier {tier}", *_cells(part))
    table.add_row("total", *_cells(report["total"]), style="bold")
    return table


def comparison_table(comparison: Comparison, names: Sequence[str]) -> Table:
    """Every metric that at least one of the two reports has."""
    table = Table(title=f"{names[1]} against {names[0]} ({comparison.scope})")
    table.add_column("metric")
    for title in (*names, f"{names[1]} / {names[0]}"):
        table.add_column(title, justify="right")
    for row in comparison.rows:
        if row.first is not None or row.second is not None:
            table.add_row(row.metric, number(row.first), number(row.second), _ratio(row))
    return table


def number(value: float | None) -> str:
    """A number as short as it can be read, or a dash."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _cells(part: Mapping[str, Any]) -> list[str]:
    return [number(part[group][key]) for _, (group, key) in RUN_COLUMNS]


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    colour = {True: "green", False: "red", None: "default"}[row.second_is_better]
    return f"[{colour}]{row.ratio:.3f}[/{colour}]"

"""Draws several runs over one another: load, throughput, latency and goodput over time.

Each run has one colour. Its switches of layout are dashed vertical lines of that colour, so that
their effect can be compared with runs that did not switch. Uses only the reports, without a
display.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.plot import (
    DOTS_PER_INCH,
    WIDTH_INCHES,
    label_phases,
    mark_switches,
    plain_text,
    shade_phases,
)

HEIGHT_INCHES = 12.0
COLOURS = ("#1f6fb4", "#e07b1a", "#2a8f4f", "#7a4fb0", "#c62828", "#5f6b7a", "#8a6d1f", "#0f8b8d")
PANELS = (
    ("in_flight", "requests in flight"),
    ("tokens", "tokens per second"),
    ("ttft_p90_ms", "TTFT p90 (ms)"),
    ("chunk_gap_p50_ms", "gap between chunks p50 (ms)"),
    ("good", "good answers per second"),
)


def draw_runs(
    reports: Sequence[Mapping[str, Any]], names: Sequence[str], image_format: str = "png"
) -> bytes:
    """Return the picture of several runs as PNG, SVG or PDF; phases are the first run's."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (column, label) in zip(panels, PANELS, strict=True):
        shade_phases(axes, reports[0])
        for index, (report, name) in enumerate(zip(reports, names, strict=True)):
            colour = COLOURS[index % len(COLOURS)]
            _draw_line(axes, report["series"], column, colour, plain_text(name))
            mark_switches(axes, report, colour, named=axes is panels[0])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.2, linewidth=0.6)
    label_phases(panels[0], reports[0])
    panels[0].legend(loc="upper right", fontsize=8)
    panels[-1].set_xlabel("seconds since the start of the run")
    panels[-1].set_xlim(0, max(float(report["duration_s"]) for report in reports) or 1.0)
    picture = io.BytesIO()
    figure.savefig(picture, format=image_format, dpi=DOTS_PER_INCH)
    return picture.getvalue()


def _draw_line(axes: Axes, series: Mapping[str, Any], column: str, colour: str, name: str) -> None:
    """Draw one run's column; seconds without samples stay empty."""
    middles = [start + series["interval_s"] / 2 for start in series["t_s"]]
    values = [float("nan") if value is None else value for value in series[column]]
    axes.plot(middles, values, color=colour, linewidth=1.4, marker=".", markersize=3, label=name)

"""Draws a report: load, tokens, TTFT and gaps over time, with phases, errors and switches.

Uses only the report's per-second series, without a display. The picture shows whether the server
keeps up when the rate changes, and what a client sees meanwhile.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 11.0, 10.0, 110
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#1f6fb4",
    "#e07b1a",
    "#2a8f4f",
    "#7a4fb0",
    "#c62828",
    "#5f6b7a",
)
LIGHTEST_SHADE, DARKEST_SHADE = 0.03, 0.16
MIN_LABEL_SHARE = 0.05


def draw_report(report: Mapping[str, Any], image_format: str = "png") -> bytes:
    """Return the picture of a run, as bytes of a PNG, SVG or PDF."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    load, tokens, first, gap = figure.subplots(4, 1, sharex=True)
    series = report["series"]
    figure.suptitle(_title(report), fontsize=11)
    _draw_load(load, series)
    _draw_step(tokens, series, "tokens", GREEN, label="tokens")
    tokens.set_ylabel("tokens per second")
    _draw_latency(first, series, "ttft", BLUE)
    first.set_ylabel("time to first token (ms)")
    _draw_latency(gap, series, "chunk_gap", PURPLE)
    gap.set_ylabel("gap between chunks (ms)")
    for axes in (load, tokens, first, gap):
        shade_phases(axes, report)
        _mark_errors(axes, series)
        mark_switches(axes, report, ORANGE, named=axes is tokens)
        axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)
        axes.set_ylim(bottom=0)
    label_phases(load, report)
    gap.set_xlabel("seconds since the start of the run")
    gap.set_xlim(0, max(float(report["duration_s"]), series["interval_s"]))
    picture = io.BytesIO()
    figure.savefig(picture, format=image_format, dpi=DOTS_PER_INCH)
    return picture.getvalue()


def _title(report: Mapping[str, Any]) -> str:
    server, requests = report["server"], report["total"]["requests"]
    stopped = "  (stopped early)" if report.get("interrupted") else ""
    model = plain_text(str(server["model"]))
    return (
        f"{model} at {server['url']}   {report.get('started_at', '')}\n"
        f"{requests['sent']} requests sent, {requests['ok']} whole, {requests['failed']} failed, "
        f"{requests['dropped_by_client']} dropped by the client{stopped}"
    )


def plain_text(text: str) -> str:
    """Escape external text for a label: a dollar sign would start a formula."""
    return text.replace("$", r"\$")


def mark_switches(axes: Axes, report: Mapping[str, Any], colour: str, *, named: bool) -> None:
    """Draw a dashed line at every switch of layout; `named` adds the new layout's name."""
    watched = report["switches"]
    for event in watched["events"] if watched else ():
        axes.axvline(event["at_s"], color=colour, linewidth=1.0, linestyle=(0, (4, 2)))
        if named:
            axes.annotate(
                plain_text(str(event["to"])),
                (event["at_s"], 0.98),
                xycoords=("data", "axes fraction"),
                rotation=90,
                va="top",
                ha="right",
                fontsize=7,
                color=colour,
            )


def _draw_load(axes: Axes, series: Mapping[str, Any]) -> None:
    _draw_step(axes, series, "arrivals", BLUE, label="requests sent per second")
    axes.set_ylabel("requests per second")
    flying = axes.twinx()
    middles = [start + series["interval_s"] / 2 for start in series["t_s"]]
    flying.plot(middles, series["in_flight"], color=ORANGE, linewidth=1.6, label="in flight")
    flying.set_ylabel("requests in flight")
    flying.set_ylim(bottom=0)
    failures = _failures(series)
    marked = [index for index, count in enumerate(failures) if count]
    if marked:
        top = max((value for value in series["arrivals"] if value), default=1)
        axes.scatter(
            [middles[index] for index in marked],
            [top] * len(marked),
            marker="x",
            color=RED,
            zorder=5,
            label=f"failed or dropped ({sum(failures)})",
        )
    handles, labels = axes.get_legend_handles_labels()
    more_handles, more_labels = flying.get_legend_handles_labels()
    flying.legend(handles + more_handles, labels + more_labels, loc="upper right", fontsize=8)


def _draw_step(
    axes: Axes, series: Mapping[str, Any], column: str, colour: str, *, label: str
) -> None:
    edges = [*series["t_s"], series["t_s"][-1] + series["interval_s"]]
    axes.stairs(series[column], edges, color=colour, fill=True, alpha=0.35, label=label)
    axes.stairs(series[column], edges, color=colour, linewidth=1.2)


def _draw_latency(axes: Axes, series: Mapping[str, Any], name: str, colour: str) -> None:
    """Draw the median as a line, the maximum as dots; seconds without samples stay empty."""
    middles = [start + series["interval_s"] / 2 for start in series["t_s"]]
    median = [float("nan") if value is None else value for value in series[f"{name}_p50_ms"]]
    worst = [float("nan") if value is None else value for value in series[f"{name}_max_ms"]]
    axes.plot(middles, median, color=colour, linewidth=1.6, marker=".", markersize=4, label="p50")
    axes.scatter(middles, worst, color=GREY, s=12, label="max")
    axes.legend(loc="upper right", fontsize=8)


def shade_phases(axes: Axes, report: Mapping[str, Any]) -> None:
    """Shade each phase; a higher rate is darker."""
    rates = [phase["rate_per_s"] or 0.0 for phase in report["phases"]]
    highest = max(rates, default=0.0)
    for phase, rate in zip(report["phases"], rates, strict=True):
        depth = rate / highest if highest else 0.0
        shade = LIGHTEST_SHADE + (DARKEST_SHADE - LIGHTEST_SHADE) * depth
        axes.axvspan(phase["start_s"], phase["end_s"], color=GREY, alpha=shade, linewidth=0)


def label_phases(axes: Axes, report: Mapping[str, Any]) -> None:
    """Name the phases above the first panel, if there is room for the name."""
    for phase in report["phases"]:
        if phase["end_s"] - phase["start_s"] < MIN_LABEL_SHARE * report["duration_s"]:
            continue
        rate = phase["rate_per_s"]
        text = phase["name"] if rate is None else f"{phase['name']}  {rate:g}/s"
        axes.annotate(
            text,
            ((phase["start_s"] + phase["end_s"]) / 2, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
            color=GREY,
        )


def _mark_errors(axes: Axes, series: Mapping[str, Any]) -> None:
    """Draw a thin red line through every second in which requests failed or were dropped."""
    for start, count in zip(series["t_s"], _failures(series), strict=True):
        if count:
            middle = start + series["interval_s"] / 2
            axes.axvline(middle, color=RED, alpha=0.35, linewidth=1.0, linestyle="--")


def _failures(series: Mapping[str, Any]) -> Sequence[int]:
    return [
        errors + dropped
        for errors, dropped in zip(series["errors"], series["dropped_by_client"], strict=True)
    ]

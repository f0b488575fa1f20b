"""Draws a GPU benchmark: TTFT by prompt, TPOT by batch, phases of switches. Needs matplotlib."""

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.gpu_numbers import Results, find, sizes
from tests.bench.gpu_report import modes

COLOURS = {"dp": "#1f6fb4", "tp": "#e07b1a"}
STYLES: dict[str, dict[str, Any]] = {
    "aileron": {"linestyle": "-", "marker": "o", "linewidth": 1.8},
    "static": {"linestyle": "--", "marker": "x", "linewidth": 1.2},
}
SHADES = {"p50": "#2a8f4f", "p99": "#7a4fb0", "max": "#c62828"}
INCHES = (13.0, 4.6)


def draw(results: Results, image_format: str = "svg") -> bytes:
    """The picture, as bytes of an SVG or PNG."""
    figure = Figure(figsize=INCHES, layout="constrained")
    first, per_token, switches = figure.subplots(1, 3)
    figure.suptitle(f"{results['shape']}, {results['hardware']}, {results['date']}", fontsize=10)
    _lines(first, results, "ttft", "prompt tokens", "TTFT (ms)")
    _lines(per_token, results, "tpot", "streams per engine", "time per output token (ms)")
    per_token.set_ylim(bottom=0)
    _phases(switches, results)
    picture = io.BytesIO()
    figure.savefig(picture, format=image_format, metadata={"Date": None})
    return picture.getvalue()


def _lines(axes: Axes, results: Results, kind: str, x_label: str, y_label: str) -> None:
    for mode in modes(results):
        for side, style in STYLES.items():
            points = [
                (int(size), value)
                for size in sizes(results, kind)
                if (value := find(results, "servers", f"{side} {mode}", kind, size, "median_ms"))
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, color=COLOURS[mode[:2]], label=f"{side} {mode}", **style)
    axes.set_xscale("log", base=2)
    if kind == "ttft":
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25, linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _phases(axes: Axes, results: Results) -> None:
    runs = find(results, "aileron", "switches") or {}
    carry = "pause" if "pause" in runs else next(iter(runs), "")
    shown = (
        {
            name.removesuffix("_ms"): numbers
            for name, numbers in find(runs, carry, "phases").items()
            if numbers and numbers["max"] > 0
        }
        if carry
        else {}
    )
    for offset, (part, colour) in enumerate(SHADES.items()):
        places = [place + (offset - 1) * 0.27 for place in range(len(shown))]
        values = [numbers[part] for numbers in shown.values()]
        axes.barh(places, values, height=0.25, color=colour, label=part)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlabel(f"ms per switch, {carry}" if carry else "no switches")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    if shown:
        axes.legend(fontsize=8)

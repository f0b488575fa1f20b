"""Percentiles and summaries of samples in milliseconds. Pure.

Percentiles interpolate linearly between the two nearest samples (numpy's default). An empty
sample's percentiles are None, never 0.
"""

from collections.abc import Iterable, Sequence
from math import floor, fsum

PERCENTILES = (50, 90, 95, 99)
DECIMALS = 3


def summarise(samples: Iterable[float | None]) -> dict[str, float | int | None]:
    """Return count, mean, p50, p90, p95, p99 and max of the samples that are not None."""
    present = sorted(value for value in samples if value is not None)
    if not present:
        none = dict.fromkeys(("mean", *(f"p{percent}" for percent in PERCENTILES), "max"))
        return {"count": 0, **none}
    return {
        "count": len(present),
        "mean": rounded(fsum(present) / len(present)),
        **{f"p{percent}": rounded(percentile(present, percent)) for percent in PERCENTILES},
        "max": rounded(present[-1]),
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the ascending, non-empty samples lie."""
    place = (len(ordered) - 1) * percent / 100
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(samples: Sequence[float]) -> float | None:
    """Return the median of the samples, or None without any."""
    return rounded(percentile(sorted(samples), 50)) if samples else None


def share(part: float, whole: float) -> float | None:
    """Return `part / whole`, or None if there is no whole."""
    return rounded(part / whole) if whole > 0 else None


def rounded(value: float) -> float:
    """Return a number rounded as in reports."""
    return round(value, DECIMALS)

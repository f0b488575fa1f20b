"""Percentiles and summaries of samples in milliseconds. Pure.

Percentiles interpolate linearly between the two nearest samples (numpy's default), and an
empty sample has no percentiles: they are None, never 0.
"""

from collections.abc import Iterable, Sequence

import numpy as np

PERCENTILES = (50, 90, 95, 99)
DECIMALS = 3


def summarise(samples: Iterable[float | None]) -> dict[str, float | int | None]:
    """Count, mean, p50, p90, p95, p99 and max of the samples that are not None."""
    present = np.fromiter((value for value in samples if value is not None), dtype=np.float64)
    names = [f"p{percent}" for percent in PERCENTILES]
    if present.size == 0:
        return {"count": 0, "mean": None, **dict.fromkeys(names), "max": None}
    values = np.percentile(present, PERCENTILES)
    return {
        "count": int(present.size),
        "mean": rounded(float(present.mean())),
        **{name: rounded(float(value)) for name, value in zip(names, values, strict=True)},
        "max": rounded(float(present.max())),
    }


def median(samples: Sequence[float]) -> float | None:
    """The middle of the samples, or None without any."""
    return rounded(float(np.percentile(samples, 50))) if samples else None


def share(part: float, whole: float) -> float | None:
    """`part / whole`, or None if there is no whole."""
    return rounded(part / whole) if whole > 0 else None


def rounded(value: float) -> float:
    """A number with as many decimals as reports show."""
    return round(value, DECIMALS)

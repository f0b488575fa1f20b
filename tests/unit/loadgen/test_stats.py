"""Percentiles against numpy and against what they must be by definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.report.stats import PERCENTILES, median, percentile, share, summarise

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@settings(deadline=None)
@given(samples=SAMPLES, percent=st.floats(0, 100))
def test_percentiles_are_numpys(samples: list[float], percent: float) -> None:
    expected = float(np.percentile(np.array(samples), percent))
    assert percentile(sorted(samples), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(samples=SAMPLES)
def test_a_summary_is_ordered_and_within_its_samples(samples: list[float]) -> None:
    summary = summarise(samples)
    levels = [summary[name] for name in (*(f"p{percent}" for percent in PERCENTILES), "max")]
    numbers = [level for level in levels if level is not None]
    assert numbers == sorted(numbers)
    assert summary["max"] == pytest.approx(max(samples), abs=0.001)
    assert summary["count"] == len(samples)
    assert numbers[0] >= min(samples) - 0.001


def test_known_values() -> None:
    summary = summarise([float(value) for value in range(1, 102)])
    assert (summary["p50"], summary["p90"], summary["p99"], summary["max"]) == (51, 91, 100, 101)
    assert summary["mean"] == 51
    assert median([1.0, 2.0]) == 1.5


def test_nothing_seen_is_none_and_none_is_not_seen() -> None:
    assert summarise([None, 4.0, None])["count"] == 1
    assert summarise([None])["p50"] is None
    assert median([]) is None
    assert share(1, 0) is None

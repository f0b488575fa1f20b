"""The rate of arrivals and the changes of it."""

import random
from collections.abc import Sequence

import pytest

from coordinator.policy.arrival_rate import BIN_MS, BINS, ArrivalRate, Rate

Span = tuple[int, int, float]
"""From and to in milliseconds, and arrivals per second in between."""


def arrivals(draw: random.Random, spans: Sequence[Span]) -> list[int]:
    """Return Poisson arrivals in milliseconds."""
    found = []
    for start_ms, end_ms, per_s in spans:
        at_ms = start_ms + draw.expovariate(per_s) * 1_000
        while at_ms < end_ms:
            found.append(int(at_ms))
            at_ms += draw.expovariate(per_s) * 1_000
    return found


def rates(times_ms: Sequence[int], asked_ms: Sequence[int]) -> list[Rate]:
    """Return what is known at each of these times."""
    rate, left = ArrivalRate(), list(reversed(times_ms))
    found = []
    for now_ms in asked_ms:
        while left and left[-1] <= now_ms:
            rate.add(left.pop())
        found.append(rate.at(now_ms))
    return found


def test_nothing_arrives() -> None:
    assert ArrivalRate().at(5_000) == Rate(0.0, 0.0)


def test_one_arrival_is_at_most_one_a_second() -> None:
    assert [each.per_s for each in rates([10_000], [10_000, 14_000])] == [1.0, 0.25]


@pytest.mark.parametrize("per_s", [0.5, 3.0, 40.0])
def test_a_steady_rate(per_s: float) -> None:
    """At nine times of ten the whole window counts; nothing but chance cuts it short."""
    times_ms = arrivals(random.Random(1), [(0, 330_000, per_s)])
    asked_ms = range(30_000, 330_000, 250)
    found = rates(times_ms, asked_ms)
    whole = [each for each in found if each.age_s > 29]
    assert len(whole) >= 0.9 * len(found)
    mean = sum(each.per_s for each in found) / len(found)
    assert mean == pytest.approx(per_s, rel=0.15)


@pytest.mark.parametrize(("low", "high"), [(2.0, 30.0), (0.5, 8.0), (10.0, 40.0)])
def test_a_burst_begins_and_ends(low: float, high: float) -> None:
    """In 17 bursts of 20, a second after its begin and two seconds after its end."""
    began, ended = 0, 0
    for seed in range(40):
        spans = [(0, 30_000, low), (30_000, 40_000, high), (40_000, 60_000, low)]
        times_ms = arrivals(random.Random(seed), spans)
        after_begin, after_end = rates(times_ms, [31_000, 42_000])
        began += after_begin.per_s > (low * high) ** 0.5 and after_begin.age_s < 2
        ended += after_end.per_s < (low * high) ** 0.5
    assert began >= 34
    assert ended >= 34


def test_after_a_pause_the_first_arrivals_count() -> None:
    (found,) = rates([0, 100, 40_000, 40_100, 40_200, 40_300], [40_500])
    assert found.per_s > 4
    assert found.age_s < 1.1


def test_arrivals_are_forgotten() -> None:
    window_ms = BINS * BIN_MS
    (found,) = rates([0, 10, 20], [window_ms + BIN_MS])
    assert found.per_s == 0.0

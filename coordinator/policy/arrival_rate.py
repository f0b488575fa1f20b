"""The rate of one tier's arrivals, and since when it holds; `arrivals` calls this module.

Arrivals of the last 30 s are counted in bins. A regime is the newest span in which one Poisson rate
explains the counts. It begins at the newest change that a likelihood ratio test finds: the counts
before and after it are far likelier with two rates than with one. So a burst shows after a handful
of its arrivals, and chance alone seldom cuts a regime short.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

BIN_MS = 250
BINS = 120
"""Arrivals older than this many bins, 30 s, are forgotten."""

AGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Bins since a change, for which the test looks; the newest bin is never full and comes on top."""

CHANGE_NATS = 6.0
"""Log likelihood ratio of a change: chance alone exceeds it once in some 2,000 tests."""

AGE_MIN_S = 1.0
"""A first regime is taken to last this long at least: one arrival is no rate."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Arrivals per second, and the seconds in which they were counted."""

    per_s: float = 0.0
    age_s: float = 0.0


class ArrivalRate:
    """Counts arrivals; times are milliseconds of one clock and never go back."""

    __slots__ = ("_counts", "_first_ms", "_newest")

    def __init__(self) -> None:
        self._counts = [0] * BINS
        """A ring: bin number modulo `BINS`."""
        self._newest = 0
        """Number of the newest bin of the ring."""
        self._first_ms: int | None = None

    def add(self, now_ms: int) -> None:
        """Count an arrival."""
        if self._first_ms is None:
            self._first_ms, self._newest = now_ms, now_ms // BIN_MS
        self._turn(now_ms)
        self._counts[self._newest % BINS] += 1

    def at(self, now_ms: int) -> Rate:
        """Return the rate of the newest regime."""
        if self._first_ms is None:
            return Rate()
        now = max(now_ms // BIN_MS, self._newest)
        # Newest bin first; bins after the newest arrival are empty.
        empty = min(BINS, now - self._newest)
        number = BINS - empty
        counts = [0] * empty + [self._counts[(self._newest - i) % BINS] for i in range(number)]
        part_s = (now_ms % BIN_MS) / 1000
        known_s = min((now_ms - self._first_ms) / 1000, part_s + (BINS - 1) * BIN_MS / 1000)
        sums = list(accumulate(counts))
        total, span_s = sums[-1], max(known_s, 0.0)
        is_first = True
        while (age := _change(sums, total, span_s, part_s)) is not None:
            total, span_s, is_first = sums[age], part_s + age * BIN_MS / 1000, False
        least_s = AGE_MIN_S if is_first else BIN_MS / 1000
        return Rate(total / max(span_s, least_s), span_s)

    def _turn(self, now_ms: int) -> None:
        """Empty the bins between the newest one and now."""
        now = now_ms // BIN_MS
        for number in range(max(self._newest + 1, now - BINS + 1), now + 1):
            self._counts[number % BINS] = 0
        self._newest = max(now, self._newest)


def _change(sums: list[int], total: int, span_s: float, part_s: float) -> int | None:
    """Return the age in bins of the likeliest change within the newest `span_s`, or None.

    `sums[i]` counts the arrivals of the newest `i` bins and of the bin that is not full.
    """
    best, found = CHANGE_NATS, None
    for age in AGES:
        after_s = part_s + age * BIN_MS / 1000
        before_s = span_s - after_s
        if before_s < BIN_MS / 1000:
            break
        after = sums[age]
        nats = _nats(after, after_s) + _nats(total - after, before_s) - _nats(total, span_s)
        if nats > best:
            best, found = nats, age
    return found


def _nats(count: int, seconds: float) -> float:
    """Return the log likelihood of a count at its own rate, less terms that cancel out."""
    return count * math.log(count / seconds) if count else 0.0

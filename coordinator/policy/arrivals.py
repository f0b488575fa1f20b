"""Arrival rates and lengths of tasks, by tier; `controller` and the simulator call this module.

Rates are exponential windows: an arrival counts 1/window at once, and fades. A window younger than
its span is scaled up, so that a first burst is not underrated.
"""

import math
from collections import deque

from coordinator.policy.demand import LONG_WINDOW_S, SHORT_WINDOW_S
from coordinator.protocol.terms import Tier

LENGTHS_MAX = 64
"""Number of newest tasks of a tier whose lengths are remembered."""

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)


AGE_MIN_S = 1.0
"""A younger window is not scaled up any further."""


class _Window:
    __slots__ = ("_at_s", "_first_s", "_rate", "_span_s")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._rate = 0.0
        self._at_s = 0.0
        self._first_s: float | None = None

    def add(self, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        self._rate = self._faded(now_s) + 1 / self._span_s
        self._at_s = now_s

    def rate(self, now_s: float) -> float:
        if self._first_s is None:
            return 0.0
        age_s = max(AGE_MIN_S, now_s - self._first_s)
        return self._faded(now_s) / (1 - math.exp(-age_s / self._span_s))

    def _faded(self, now_s: float) -> float:
        return self._rate * math.exp(-max(0.0, now_s - self._at_s) / self._span_s)


class TierArrivals:
    """The arrivals of one tier."""

    __slots__ = ("_long", "_outputs", "_prompts", "_quantiles", "_short")

    def __init__(self) -> None:
        self._short = _Window(SHORT_WINDOW_S)
        self._long = _Window(LONG_WINDOW_S)
        self._prompts: deque[int] = deque(maxlen=LENGTHS_MAX)
        self._outputs: deque[int] = deque(maxlen=LENGTHS_MAX)
        self._quantiles: tuple[int, ...] | None = None

    def on_arrival(self, prompt_tokens: int, now_ms: int) -> None:
        """Count a task."""
        self._short.add(now_ms / 1000)
        self._long.add(now_ms / 1000)
        self._prompts.append(prompt_tokens)
        self._quantiles = None

    def on_end(self, output_tokens: int) -> None:
        """Record how many tokens a finished task generated."""
        self._outputs.append(output_tokens)

    def rates(self, now_ms: int) -> tuple[float, float]:
        """Return arrivals per second over the short and the long window."""
        return self._short.rate(now_ms / 1000), self._long.rate(now_ms / 1000)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Quantiles of the newest prompts' lengths; empty before the first."""
        if self._quantiles is None:
            ordered = sorted(self._prompts)
            last = len(ordered) - 1
            self._quantiles = (
                tuple(max(1, ordered[round(q * last)]) for q in QUANTILES) if ordered else ()
            )
        return self._quantiles

    @property
    def output_tokens(self) -> float:
        """Mean output of the newest finished tasks; 0 before the first."""
        return sum(self._outputs) / len(self._outputs) if self._outputs else 0.0


class Arrivals:
    """The arrivals of every tier."""

    __slots__ = ("_tiers",)

    def __init__(self) -> None:
        self._tiers = {tier: TierArrivals() for tier in Tier}

    def __getitem__(self, tier: Tier) -> TierArrivals:
        """Return the arrivals of one tier."""
        return self._tiers[tier]

"""Arrival rates and lengths of tasks, by tier; `controller` and the simulator call this module."""

from collections import deque

from coordinator.policy.arrival_rate import ArrivalRate, Rate
from coordinator.protocol.terms import Tier

LENGTHS_MAX = 64
"""Number of newest tasks of a tier whose lengths are remembered."""

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)

LENGTHS_MIN = 8
"""A regime with fewer prompts borrows the lengths of earlier ones."""


class TierArrivals:
    """The arrivals of one tier."""

    __slots__ = ("_outputs", "_prompts", "_rate")

    def __init__(self) -> None:
        self._rate = ArrivalRate()
        self._prompts: deque[tuple[int, int]] = deque(maxlen=LENGTHS_MAX)
        """(arrival in ms, tokens) of the newest prompts."""
        self._outputs: deque[int] = deque(maxlen=LENGTHS_MAX)

    def on_arrival(self, prompt_tokens: int, now_ms: int) -> None:
        """Count a task."""
        self._rate.add(now_ms)
        self._prompts.append((now_ms, prompt_tokens))

    def on_end(self, output_tokens: int) -> None:
        """Record how many tokens a finished task generated."""
        self._outputs.append(output_tokens)

    def rate(self, now_ms: int) -> Rate:
        """Return the rate of the newest regime."""
        return self._rate.at(now_ms)

    def prompts(self, now_ms: int, rate: Rate) -> tuple[int, ...]:
        """Return quantiles of the prompts' lengths in a regime; empty before the first prompt."""
        since_ms = now_ms - rate.age_s * 1000
        newest = [tokens for arrived_ms, tokens in self._prompts if arrived_ms >= since_ms]
        if len(newest) < LENGTHS_MIN:
            newest = [tokens for _, tokens in self._prompts]
        ordered = sorted(newest)
        last = len(ordered) - 1
        return tuple(max(1, ordered[round(q * last)]) for q in QUANTILES) if ordered else ()

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

"""When a dead child is restarted, and when to give up. Pure."""

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
STEADY_S = 30.0
"""A process that ran for longer had started well: its next failure counts as the first."""
QUICK_FAILURES_MAX = 5
"""Consecutive failures, each within `STEADY_S` of a start, after which it is not restarted."""


class Restarts:
    """The failures of one child; call `delay_after` once for each."""

    def __init__(self) -> None:
        self._quick_failures = 0

    def delay_after(self, uptime_s: float) -> float | None:
        """Return the seconds to wait before the next start, or None to give up."""
        self._quick_failures = 1 if uptime_s > STEADY_S else self._quick_failures + 1
        if self._quick_failures > QUICK_FAILURES_MAX:
            return None
        doubled: float = FIRST_DELAY_S * 2 ** (self._quick_failures - 1)
        return min(doubled, LONGEST_DELAY_S)

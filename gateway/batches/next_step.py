"""Decides the next step of a batch, and the next lines of a running one. Pure.

The runner carries the decisions out. This state may be lost in a crash: it follows from the record
and from the lines that have a result in the store.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Final

from gateway.batches.lines import Result
from gateway.batches.terms import BatchRecord, Status

TRIES_MAX = 3
"""Most tries of a line that ends with a server error."""
PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 30.0
"""Longest pause after the server refused a line or failed."""

_FULL: Final[frozenset[int]] = frozenset({429, 503})
_TRY_AGAIN: Final[frozenset[int]] = frozenset({408, 500, 502, 504})


class Step(Enum):
    """What a batch needs."""

    VALIDATE = "check its input file"
    RUN = "run lines that have no result"
    CLOSE = "stop running lines and begin to write its files"
    WRITE = "write its files"
    NOTHING = "it has ended"


def next_step(batch: BatchRecord, now_s: float) -> Step:
    """Return the next step of a batch; `now_s` is Unix time."""
    match batch.status:
        case Status.VALIDATING:
            return Step.VALIDATE
        case Status.IN_PROGRESS:
            is_over = batch.counts.done == batch.counts.total or now_s >= batch.expires_at
            return Step.CLOSE if is_over else Step.RUN
        case Status.FINALIZING | Status.CANCELLING:
            return Step.WRITE
        case _:
            assert batch.has_ended
            return Step.NOTHING


class LineBook:
    """The lines of one batch while it runs: waiting, in flight, answered, recorded."""

    def __init__(self, total: int, recorded: Iterable[int]) -> None:
        """Begin with all lines 1..total but the recorded ones."""
        self._recorded = set(recorded)
        self._total = total
        self._next = 1
        self._again: deque[int] = deque()
        self._tries: dict[int, int] = {}
        self._in_flight: set[int] = set()
        self._answered: list[Result] = []
        self._pause_s = 0.0
        self.paused_until_s = 0.0
        """Time before which no line begins."""

    @property
    def in_flight(self) -> frozenset[int]:
        """Lines that were begun and have no answer."""
        return frozenset(self._in_flight)

    @property
    def is_done(self) -> bool:
        """Whether every line has its result in the store."""
        return len(self._recorded) == self._total

    def begin(self, now_s: float, at_once: int) -> list[int]:
        """Return the lines to begin now, so that at most `at_once` are open."""
        begun: list[int] = []
        while now_s >= self.paused_until_s and self.on_their_way < at_once:
            number = self._take()
            if number is None:
                break
            self._in_flight.add(number)
            begun.append(number)
        return begun

    @property
    def on_their_way(self) -> int:
        """Number of lines in flight, or with a result not yet in the store."""
        return len(self._in_flight) + len(self._answered)

    def answered(self, result: Result, status: int) -> None:
        """Record a line's final answer."""
        self._in_flight.remove(result.number)
        self._tries.pop(result.number, None)
        self._answered.append(result)
        if status not in _FULL:
            self._pause_s = 0.0

    def is_final(self, number: int, status: int) -> bool:
        """Return whether an answer with this HTTP status is final for its line."""
        if status in _FULL:
            return False
        return status not in _TRY_AGAIN or self._tries.get(number, 0) + 1 >= TRIES_MAX

    def refused(self, number: int, status: int, now_s: float, retry_after_s: float = 0.0) -> None:
        """Queue a line for another try, after a pause in which no line begins."""
        self._in_flight.remove(number)
        self._again.append(number)
        if status not in _FULL:
            self._tries[number] = self._tries.get(number, 0) + 1
        if now_s >= self.paused_until_s:
            # Lines that are refused together count as one refusal.
            self._pause_s = min(max(self._pause_s * 2, PAUSE_S_MIN), PAUSE_S_MAX)
        wait_s = min(max(self._pause_s, retry_after_s), PAUSE_S_MAX)
        self.paused_until_s = max(self.paused_until_s, now_s + wait_s)

    def answers(self) -> tuple[Result, ...]:
        """Return the results to be put into the store."""
        return tuple(self._answered)

    def recorded(self, results: Iterable[Result]) -> None:
        """Record that these results are in the store."""
        numbers = {result.number for result in results}
        assert not numbers & self._recorded, "a line has one result."
        self._recorded |= numbers
        self._answered = [each for each in self._answered if each.number not in numbers]

    def _take(self) -> int | None:
        if self._again:
            return self._again.popleft()
        while self._next <= self._total and self._next in self._recorded:
            self._next += 1
        if self._next > self._total:
            return None
        self._next += 1
        return self._next - 1

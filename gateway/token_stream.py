"""Puts one task's tokens in order and delivers each exactly once.

Leaders send spans: tokens first..first+count-1 of one attempt. Invariant: delivered indices are 0,
1, 2, ... without gap or repeat, even if spans repeat, arrive out of order or come from a replaced
attempt. An older attempt counts only below the index where a newer one started: from there on the
two may have sampled different tokens. Called by the relay for every span; pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from coordinator.protocol.messages.rank import TokenSpan

Payload = TypeVar("Payload")

HELD_SPANS_MAX = 1_024
"""Most spans of one task that wait for an earlier one."""

NO_ATTEMPT = 0
"""Attempts count from 1."""


class Verdict(Enum):
    """What to do with an unchanged span; `Trim` is the fourth answer."""

    FORWARD = "forward"
    """Deliver all of it, unchanged."""
    HOLD = "hold"
    """An earlier token is missing: pass it to `TokenStream.hold`."""
    DROP = "drop"
    """All of it was delivered already, or its attempt was replaced."""


@dataclass(frozen=True, slots=True)
class Trim:
    """Deliver tokens skip..skip+keep-1 of the span, and its end only if `finished`.

    Also the answer for the first span of a later attempt, whose `skip` may be 0: that span repeats
    data sent once per request (prompt logprobs, prefill statistics), which must be removed.
    """

    skip: int
    keep: int
    finished: bool


Answer = Verdict | Trim


class TokenStream(Generic[Payload]):
    """The next index to deliver, the known attempts, and the spans that arrived too early."""

    __slots__ = ("_current", "_fence", "_held", "_newest", "_starts", "ended", "expected")

    def __init__(self) -> None:
        self.expected = 0
        """Index of the next token to deliver, and the number delivered."""
        self.ended = False
        """Whether the end of the stream was delivered."""
        # The attempt of the last delivered span, and the newest known attempt.
        self._current = NO_ATTEMPT
        self._newest = NO_ATTEMPT
        self._fence = NO_ATTEMPT
        # Lowest known index of each attempt that is not fenced off.
        self._starts: dict[int, int] = {}
        self._held: list[tuple[TokenSpan, Payload]] = []

    @property
    def attempt(self) -> int:
        """The highest attempt that is known or fenced off."""
        return max(self._newest, self._fence)

    @property
    def void_attempt(self) -> int:
        """The highest attempt that is fenced off; no token of it and of those below counts."""
        return self._fence

    @property
    def holding(self) -> int:
        """Number of spans that wait for an earlier one."""
        return len(self._held)

    def offer(self, span: TokenSpan) -> Answer:
        """Decide about a span; any answer but HOLD and DROP counts it as delivered."""
        if span.first == self.expected and span.attempt == self._current == self._newest:
            self.expected += span.count
            if span.finished:
                self._end()
            return Verdict.FORWARD
        return self._judge(span)

    def hold(self, span: TokenSpan, payload: Payload) -> bool:
        """Keep a span that `offer` answered with HOLD; False if too many wait already."""
        if len(self._held) >= HELD_SPANS_MAX:
            return False
        self._held.append((span, payload))
        return True

    def ready(self) -> Iterator[tuple[Answer, Payload]]:
        """Yield held spans that have become deliverable, in order, with FORWARD or a Trim."""
        while (index := self._deliverable()) is not None:
            span, payload = self._held.pop(index)
            answer = self._judge(span)
            if answer is not Verdict.DROP:
                yield answer, payload

    def fence(self, attempt: int) -> None:
        """Drop `attempt` and all earlier ones: the next one starts at `expected`."""
        self._fence = max(self._fence, attempt)
        self._starts = {each: start for each, start in self._starts.items() if each > self._fence}
        self._held = [each for each in self._held if each[0].attempt > self._fence]
        self._newest = max(self._starts, default=NO_ATTEMPT)
        if self._current <= self._fence:
            self._current = NO_ATTEMPT

    def _end(self) -> None:
        self.ended = True
        self._held.clear()
        # Keeps later spans off the fast path of `offer`.
        self._current = NO_ATTEMPT

    def _deliverable(self) -> int | None:
        for index, (span, _) in enumerate(self._held):
            if span.first <= self.expected:
                return index
        return None

    def _judge(self, span: TokenSpan) -> Answer:
        if self.ended or span.attempt <= self._fence:
            return Verdict.DROP
        self._newest = max(self._newest, span.attempt)
        self._starts[span.attempt] = min(span.first, self._starts.get(span.attempt, span.first))
        newer = [start for attempt, start in self._starts.items() if attempt > span.attempt]
        end = span.first + span.count
        keep_end = min([end, *newer])
        finished = span.finished and keep_end == end
        if finished and not newer:
            # The newest attempt decides where the stream ends, even before delivered tokens.
            keep_end = max(keep_end, self.expected)
        if keep_end < self.expected or (keep_end == self.expected and not finished):
            return Verdict.DROP
        if span.first > self.expected:
            return Verdict.HOLD if keep_end > span.first or finished else Verdict.DROP
        return self._deliver(span, keep_end, finished)

    def _deliver(self, span: TokenSpan, keep_end: int, finished: bool) -> Answer:
        skip = min(self.expected - span.first, span.count)
        trim = Trim(
            skip, max(0, min(keep_end, span.first + span.count) - span.first - skip), finished
        )
        restarted = self.expected > 0 and span.attempt != self._current
        self._current = span.attempt
        self.expected += trim.keep
        if finished:
            self._end()
        whole = trim.keep == span.count and finished == span.finished
        return Verdict.FORWARD if whole and not restarted else trim

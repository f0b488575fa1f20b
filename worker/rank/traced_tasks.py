"""The book of led tasks where tasks are traced: a span for each stay of a task in a group.

A stay is from a task's placement (or its arrival by a move) until it leaves, and its steps are
summed up: one span per step would be more than a collector can take. Takes the place of `LedTasks`
only where tracing is on.
"""

import time

from comm_pool.layout import Rank
from coordinator.protocol import trace_context as words
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.terms import EndCause, TaskId
from coordinator.protocol.tracing import Span, Tracing
from worker.rank.led_tasks import LedTask, LedTasks


class TracedTasks(LedTasks):
    """Begins a span where a traced task is opened, and ends it where it is closed."""

    def __init__(self, tracing: Tracing, rank: Rank) -> None:
        """`rank` is the one that leads the tasks."""
        super().__init__()
        self._tracing = tracing
        self._rank = rank
        self._stays: dict[TaskId, _Stay] = {}

    def open(self, led: LedTask) -> None:
        """Take a task in."""
        super().open(led)
        header, group = led.header, led.group
        if not header.trace:
            return
        about: dict[str, str | int] = {
            "aileron.rank": int(self._rank),
            "aileron.group": group.name,
            "aileron.mode": str(group.mode),
            "aileron.width": group.width,
            "aileron.attempt": led.attempt,
            "aileron.tokens_before": led.emitted,
            words.INPUT_TOKENS: header.prompt_tokens,
        }
        self._stays[header.task] = _Stay(self._tracing.start("generate", header.trace, about))

    def emit(self, task: TaskId, count: int, *, finished: bool) -> TokenSpan:
        """Advance a task's stream."""
        stay = self._stays.get(task)
        if stay is not None and count:
            stay.stepped(count)
        return super().emit(task, count, finished=finished)

    def close(self, task: TaskId, why: str = "") -> LedTask | None:
        """Forget a task."""
        stay = self._stays.pop(task, None)
        if stay is not None:
            stay.left(why)
        return super().close(task, why)


class _Stay:
    """What a task did in a group so far; times are of the monotonic clock, in nanoseconds."""

    __slots__ = ("_began_ns", "_first_ns", "_last_ns", "_span", "_steps", "_tokens")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._began_ns = time.monotonic_ns()
        self._first_ns = self._last_ns = 0
        self._steps = self._tokens = 0

    def stepped(self, count: int) -> None:
        """A step gave the task tokens."""
        self._last_ns = time.monotonic_ns()
        if not self._steps:
            self._first_ns = self._last_ns
            self._span.event(words.FIRST_TOKEN_EVENT)
        self._steps += 1
        self._tokens += count

    def left(self, why: str) -> None:
        """Sum it up: prefill is until the first token of the stay, decode from there on."""
        about: dict[str, str | int | float] = {
            "aileron.left": str(why),
            "aileron.steps": self._steps,
            words.OUTPUT_TOKENS: self._tokens,
        }
        if self._steps:
            about["aileron.prefill_seconds"] = (self._first_ns - self._began_ns) * 1e-9
            about["aileron.decode_seconds"] = (self._last_ns - self._first_ns) * 1e-9
        self._span.set(about)
        self._span.end(error=why if why == EndCause.FAILED else "")

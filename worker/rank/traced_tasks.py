"""Led tasks with tracing: one span for each stay of a task in a group.

A stay lasts from a task's placement, or its arrival by a migration, until it leaves. The span sums
up its steps: one span per step would overload a collector. Replaces `LedTasks` where tracing is on.
"""

import time

from comm_pool.layout import Rank
from coordinator.protocol import trace_context as words
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.terms import EndCause, TaskId
from coordinator.protocol.tracing import Span, Tracing
from worker.rank.led_tasks import LedTask, LedTasks


class TracedTasks(LedTasks):
    """Begins a span when a traced task is opened and ends it when the task is closed."""

    def __init__(self, tracing: Tracing, rank: Rank) -> None:
        """`rank` leads the tasks."""
        super().__init__()
        self._tracing = tracing
        self._rank = rank
        self._stays: dict[TaskId, _Stay] = {}

    def open(self, led: LedTask) -> None:
        """Add a task."""
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

    def emit(self, led: LedTask, count: int, *, finished: bool) -> TokenSpan:
        """Advance a task's stream."""
        stay = self._stays.get(led.header.task)
        if stay is not None and count:
            stay.stepped(count)
        return super().emit(led, count, finished=finished)

    def close(self, task: TaskId, why: str = "") -> LedTask | None:
        """Forget a task."""
        stay = self._stays.pop(task, None)
        if stay is not None:
            stay.end(why)
        return super().close(task, why)


class _Stay:
    """A task's stay in a group so far; times are of the monotonic clock, in nanoseconds."""

    __slots__ = ("_began_ns", "_first_ns", "_last_ns", "_span", "_steps", "_tokens")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._began_ns = time.monotonic_ns()
        self._first_ns = self._last_ns = 0
        self._steps = self._tokens = 0

    def stepped(self, count: int) -> None:
        """Count a step that gave the task tokens."""
        self._last_ns = time.monotonic_ns()
        if not self._steps:
            self._first_ns = self._last_ns
            self._span.event(words.FIRST_TOKEN_EVENT)
        self._steps += 1
        self._tokens += count

    def end(self, why: str) -> None:
        """End the span: prefill lasts until the first token of the stay, decode from there on."""
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

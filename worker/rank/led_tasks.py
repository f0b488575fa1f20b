"""The tasks that this rank leads: where their tokens go, and how many have been sent.

Invariant: `emitted` is the index of the next token of a task's stream, over all attempts. Pure;
used by the rank's main loop alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from comm_pool.layout import Group
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId

MOVED = "moved"
"""The cause given when another leader continues the task."""


@dataclass(slots=True)
class LedTask:
    """A task in one of this rank's schedulers."""

    header: TaskHeader
    attempt: int
    group: Group
    emitted: int
    payload: bytes = b""
    """The gateway's request, for the next leader of the task."""
    waited_ms: int = 0
    """How long the task waited in the pool before it was placed here."""


class LedTasks:
    """All tasks that this rank leads, in any mode."""

    def __init__(self) -> None:
        self._tasks: dict[TaskId, LedTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[LedTask]:
        return iter(self._tasks.values())

    def open(self, led: LedTask) -> None:
        """Add a task; earlier attempts made the tokens that it has."""
        self._tasks[led.header.task] = led

    def get(self, task: TaskId) -> LedTask | None:
        """Return the task, or None if this rank does not lead it (any more)."""
        return self._tasks.get(task)

    def close(self, task: TaskId, _why: str = "") -> LedTask | None:
        """Forget a task and return it; `_why` is for subclasses that trace tasks."""
        return self._tasks.pop(task, None)

    def emit(self, led: LedTask, count: int, *, finished: bool) -> TokenSpan:
        """Advance a task's stream by `count` tokens and describe them."""
        waited_ms = 0 if led.emitted else led.waited_ms
        span = TokenSpan(led.header.task, led.attempt, led.emitted, count, finished, waited_ms)
        led.emitted += count
        return span

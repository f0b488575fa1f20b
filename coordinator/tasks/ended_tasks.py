"""Recently ended tasks, remembered so that late and repeated messages do no harm.

The leader that finished a task has pushed its last tokens, but they may be lost with that leader
until the gateway confirms all of them; then the task must run again. The task pool calls this
module.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from comm_pool.layout import Rank
from coordinator.protocol.messages.gateway import Resubmit, TaskFailed
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId

ENDED_REMEMBERED = 16_384
"""Number of ended tasks to remember; more than messages in flight can name."""


@dataclass(slots=True)
class EndedTask:
    """What is remembered of a task."""

    header: TaskHeader
    attempt: int
    arrival: int
    arrived_ms: int
    pushed_by: frozenset[Rank] = frozenset()
    """The ranks that pushed its last tokens; empty once the gateway has them all or needs none."""
    may_return: bool = False
    """The gateway may submit it again: its last tokens may be lost, or the pool gave it up."""
    failure: TaskFailed | None = None
    """The failure sent to the gateway, to be repeated on request."""


class EndedTasks:
    """The last `ENDED_REMEMBERED` tasks that ended."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended: OrderedDict[TaskId, EndedTask] = OrderedDict()

    def __contains__(self, task: object) -> bool:
        """Return whether the task ended recently."""
        return task in self._ended

    def __getitem__(self, task: TaskId) -> EndedTask:
        """Return the record of a task that ended recently."""
        return self._ended[task]

    def add(self, task: TaskId, ended: EndedTask) -> None:
        """Remember an end, and forget the oldest above the limit."""
        self._ended[task] = ended
        while len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def get(self, task: TaskId) -> EndedTask | None:
        """Return the record of the task, or None."""
        return self._ended.get(task)

    def revive(self, task: TaskId) -> EndedTask:
        """Forget the end: the task runs again."""
        return self._ended.pop(task)

    def settle(self, task: TaskId) -> None:
        """Record that the gateway needs nothing more of this task."""
        if ended := self._ended.get(task):
            ended.pushed_by = frozenset()
            ended.may_return = False

    def in_doubt(self, rank: Rank, reply_to: str | None = None) -> Iterator[tuple[str, Resubmit]]:
        """Yield (gateway, request) for tasks whose last tokens may be lost with the rank.

        With `reply_to` only its link to that address was lost. The tasks may return from now on.
        """
        for task, ended in self._ended.items():
            if rank in ended.pushed_by and reply_to in (None, ended.header.reply_to):
                ended.may_return = True
                yield ended.header.gateway, Resubmit(task, ended.attempt + 1)

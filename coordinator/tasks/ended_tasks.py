"""Tasks that ended, remembered for a while so that late and repeated messages do no harm.

The leader that finished a task has pushed its last tokens, but until the gateway says that it has
them all they may be lost with that leader; then the task must run again. Called by the task pool.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from comm_pool.layout import Rank
from coordinator.protocol.messages.gateway import Resubmit, TaskFailed
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId

ENDED_REMEMBERED = 16_384
"""Ended tasks that are remembered; more than can be under way in messages."""


@dataclass(slots=True)
class EndedTask:
    """What is left of a task."""

    header: TaskHeader
    attempt: int
    arrival: int
    arrived_ms: int
    pushed_by: frozenset[Rank] = frozenset()
    """Who pushed its last tokens; nobody once the gateway has them all, or needs none."""
    may_return: bool = False
    """The gateway may submit it again: its last tokens may be lost, or it was given up here."""
    failure: TaskFailed | None = None
    """What the gateway was told, to be told again."""


class EndedTasks:
    """The last `ENDED_REMEMBERED` tasks that ended."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended: OrderedDict[TaskId, EndedTask] = OrderedDict()

    def __contains__(self, task: object) -> bool:
        """Say whether the task ended not long ago."""
        return task in self._ended

    def __getitem__(self, task: TaskId) -> EndedTask:
        """Return what is left of a task that ended not long ago."""
        return self._ended[task]

    def add(self, task: TaskId, ended: EndedTask) -> None:
        """Remember an end, and forget the oldest one if there are too many."""
        self._ended[task] = ended
        while len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def get(self, task: TaskId) -> EndedTask | None:
        """Return what is left of the task."""
        return self._ended.get(task)

    def revive(self, task: TaskId) -> EndedTask:
        """Forget the end: the task runs again."""
        return self._ended.pop(task)

    def settle(self, task: TaskId) -> None:
        """The gateway needs nothing more of this task."""
        if ended := self._ended.get(task):
            ended.pushed_by = frozenset()
            ended.may_return = False

    def in_doubt(self, rank: Rank, reply_to: str | None = None) -> Iterator[tuple[str, Resubmit]]:
        """Yield what to ask the gateways of tasks whose last tokens may be lost with the rank.

        With `reply_to` only its link to that address was lost. The tasks may return from now on.
        """
        for task, ended in self._ended.items():
            if rank in ended.pushed_by and reply_to in (None, ended.header.reply_to):
                ended.may_return = True
                yield ended.header.gateway, Resubmit(task, ended.attempt + 1)

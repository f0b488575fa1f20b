"""The old tasks that a switch still waits for (soft preempt).

A group that is to change under `speculate` keeps serving. The tasks that it ran when the switch was
wanted are its stragglers. Once it has none it is idle and may begin new tasks in its old mode; they
are carried over when the last straggler of the cell has ended. Source: Flying Serving 5.2, which
recomputes those tasks; here their KV migrates. The core calls this module.
"""

from collections.abc import Callable, Iterable

from comm_pool.layout import Rank
from coordinator.protocol.terms import TaskId


class Stragglers:
    """The old tasks of each leader."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[Rank, set[TaskId]] = {}

    def start(self, leaders: Iterable[Rank], led_by: Callable[[Rank], Iterable[TaskId]]) -> None:
        """Wait for the tasks that these leaders run now."""
        self._of = {leader: set(led_by(leader)) for leader in leaders}

    def ended(self, leader: Rank, task: TaskId) -> bool:
        """Record that a leader's task ended; return whether it was a straggler."""
        tasks = self._of.get(leader)
        if tasks is None or task not in tasks:
            return False
        tasks.remove(task)
        return True

    def prune(self, led_by: Callable[[Rank], Iterable[TaskId]]) -> None:
        """Forget tasks that their leader lost in another way; costs O(tasks)."""
        for leader, tasks in self._of.items():
            tasks.intersection_update(led_by(leader))

    def is_idle(self, leader: Rank) -> bool:
        """Return whether the leader's group is to change and has no straggler."""
        return not self._of.get(leader, True)

    @property
    def are_done(self) -> bool:
        """No straggler is left."""
        return not any(self._of.values())

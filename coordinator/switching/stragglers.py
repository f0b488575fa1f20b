"""Who still finishes old tasks while a switch waits for them (soft preempt).

A group that is to change under `speculate` keeps serving. The tasks that it ran when the switch was
wanted are its stragglers; once it has none it is idle, and may begin new tasks in its old mode,
which are carried over when the last straggler of the cell has ended. Source: Flying Serving 5.2,
which computes those tasks again; here their KV moves. Called by the core.
"""

from collections.abc import Callable, Iterable

from comm_pool.layout import Rank
from coordinator.protocol.terms import TaskId


class Stragglers:
    """The old tasks by their leader."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[Rank, set[TaskId]] = {}

    def start(self, leaders: Iterable[Rank], led_by: Callable[[Rank], Iterable[TaskId]]) -> None:
        """Wait for what these leaders run now."""
        self._of = {leader: set(led_by(leader)) for leader in leaders}

    def ended(self, leader: Rank, task: TaskId) -> bool:
        """Take note that a leader's task ended; say whether it was waited for."""
        tasks = self._of.get(leader)
        if tasks is None or task not in tasks:
            return False
        tasks.remove(task)
        return True

    def prune(self, led_by: Callable[[Rank], Iterable[TaskId]]) -> None:
        """Forget tasks that their leader has lost in another way; costs O(tasks)."""
        for leader, tasks in self._of.items():
            tasks.intersection_update(led_by(leader))

    def is_idle(self, leader: Rank) -> bool:
        """Say whether the leader's group is to change, and has nothing old to finish."""
        return not self._of.get(leader, True)

    @property
    def are_done(self) -> bool:
        """Nothing is waited for."""
        return not any(self._of.values())

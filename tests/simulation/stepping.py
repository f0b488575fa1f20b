"""Step queues and collectives, as blunt as the real ones: bounded, in order, all or nobody."""

from dataclasses import dataclass, field

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import LeaseRetention
from coordinator.protocol.terms import Binding
from tests.simulation.checkers import check
from tests.simulation.sim_memory import Places

CAPACITY = 6
"""Messages that a step queue holds until every follower has read them."""

ABORT_AFTER_TICKS = 6
"""How long the survivors of a step wait for a dead member before their collective fails."""


@dataclass(frozen=True)
class Begin:
    """First message of a formation: what its members lease."""

    formation: int
    grant_pages: int
    kept: LeaseRetention | None
    version: int
    """The last word of the leader on what it kept of the lease; it is part of this message now."""


@dataclass(frozen=True)
class LeaveGroup:
    """The leader has left the formation; its tasks still hold `kept` of the lease, or all."""

    formation: int
    kept: frozenset[int] | None


@dataclass(eq=False)
class Step:
    """One forward step: complete when every member of the formation has executed it."""

    binding: Binding
    table: frozenset[int]
    """The leader's lease indices."""
    batch: tuple[tuple[str, int, int], ...]
    """(task, attempt, tokens that had KV before) of each task."""
    found: Places = ()
    """KV that the step relies on, of tasks that were paused or moved."""
    made: Places = ()
    """KV that the step makes."""
    arrived: set[Rank] = field(default_factory=set)
    failed: bool = False
    dead_since: int | None = None

    @property
    def formation(self) -> int:
        return self.binding.formation

    @property
    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.binding.group.ranks)

    @property
    def is_over(self) -> bool:
        return self.failed or self.is_complete


QueueMessage = Begin | LeaveGroup | Step


class StepQueue:
    """From one leader to all its followers; a slot is free again when all have read it."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._messages: list[QueueMessage] = []
        self._read: dict[Rank, int] = dict.fromkeys(ranks[1:], 0)

    @property
    def has_room(self) -> bool:
        return len(self._messages) - min(self._read.values()) < CAPACITY

    def put(self, message: QueueMessage) -> None:
        check(self.has_room, "a message was put into a full step queue")
        self._messages.append(message)

    def skip(self, rank: Rank) -> None:
        """A new process of this rank reads what is put from now on."""
        self._read[rank] = len(self._messages)

    def has_unread(self, rank: Rank) -> bool:
        return self._read[rank] < len(self._messages)

    def take(self, rank: Rank) -> QueueMessage | None:
        index = self._read[rank]
        if index == len(self._messages):
            return None
        self._read[rank] = index + 1
        return self._messages[index]

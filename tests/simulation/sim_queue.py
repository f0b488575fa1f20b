"""The step queues of a simulated cell: bounded, in order, from one leader to all its followers."""

from typing import TYPE_CHECKING, Any

from comm_pool.layout import Rank
from tests.harness.worker.fake_engine import FakeQueue
from tests.simulation.sim_host import IDLE_TICKS, TICK_MS
from worker.io.step_queue import FOLLOWER_POLL_S, QueueMessage

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank

CAPACITY = 2
"""Messages that a step queue holds until every follower has read them."""


class SharedQueue:
    """The memory of one queue; a slot is free again when all have read it."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._messages: list[QueueMessage] = []
        self._read: dict[Rank, int] = dict.fromkeys(ranks[1:], 0)

    @property
    def has_room(self) -> bool:
        return len(self._messages) - min(self._read.values()) < CAPACITY

    def put(self, message: QueueMessage) -> None:
        self._messages.append(message)

    def skip(self, rank: Rank) -> None:
        """A new process of this rank reads what is put from now on."""
        if rank in self._read:
            self._read[rank] = len(self._messages)

    def has_unread(self, rank: Rank) -> bool:
        return self._read[rank] < len(self._messages)

    def take(self, rank: Rank) -> QueueMessage:
        index = self._read[rank]
        self._read[rank] = index + 1
        return self._messages[index]


class SimQueue(FakeQueue):
    """One member's end."""

    def __init__(self, process: "SimRank", shared: SharedQueue) -> None:
        self._process = process
        self._shared = shared

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """See `BroadcastQueue`."""
        shared = self._shared
        if not shared.has_room:
            self._process.world.stats.blocked += 1
            if timeout:
                self._process.host.wait(lambda: shared.has_room, timeout)
        if not shared.has_room:
            raise TimeoutError
        shared.put(obj)

    def dequeue(self, timeout: float | None = None) -> Any:
        """See `BroadcastQueue`."""
        process, shared = self._process, self._shared
        rank, inbox = process.rank, process.inbox
        if timeout and not shared.has_unread(rank):
            if timeout == FOLLOWER_POLL_S:
                timeout = IDLE_TICKS * TICK_MS / 1_000
            process.host.wait(lambda: shared.has_unread(rank) or not inbox.empty(), timeout)
        if not shared.has_unread(rank):
            raise TimeoutError
        return shared.take(rank)

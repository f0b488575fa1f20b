"""Messages from a leader to its followers, on the group's shared-memory broadcast queue.

Every message carries its formation; a follower drops those of other formations. Order makes
switching safe: a leave message follows the last step, so no rank enters a collective that another
will not enter. The payload of a step is opaque here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from comm_pool.formations import PeerLostError
from worker.io.host import HOST, Host

FOLLOWER_POLL_S = 0.01
"""How long a joined follower waits for a step before it checks its inbox again."""

LEADER_SEND_LIMIT_S = 30.0
"""A follower that reads nothing for this long counts as lost."""


LOSS_POLL_S = 0.05
"""How often a leader that waits for room checks whether a follower was lost."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The formation serves: keep these lease indices, then lease this many more pages.

    `version` is that of the leader's newest retention of the lease; `lease_indices` supersede it.
    `is_busy`: steps follow at once, as the leader has tasks. `meets`: copies of the migration that
    formed the group may be in flight, so members first wait for each other's.
    """

    formation: int
    lease_indices: tuple[int, ...]
    grant_pages: int
    version: int = -1
    is_busy: bool = False
    meets: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Execute this step plan; a deferred one a little later (`worker.rank.steps`)."""

    formation: int
    plan: Any
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class SetAside:
    """No task gets these lease indices: members may copy KV to their pages, in a round of a switch.

    None: tasks get them again, so a member that has read this copies nothing there.
    """

    formation: int
    epoch: int
    round: int
    lease_indices: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """The leader has left; its followers may leave too.

    `lease_indices` are those that its tasks still hold; None: the whole lease, for a migration.
    """

    formation: int
    lease_indices: tuple[int, ...] | None


QueueMessage = Begin | Step | SetAside | LeaveGroup


class BroadcastQueue(Protocol):
    """The part of vLLM's `MessageQueue` that is used here."""

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Block until there is room, or raise TimeoutError."""

    def dequeue(self, timeout: float | None = None) -> Any:
        """Block until there is a message, or raise TimeoutError."""


def send(
    queue: BroadcastQueue,
    message: QueueMessage,
    wait_s: float,
    is_lost: Callable[[], bool],
    host: Host = HOST,
) -> None:
    """Send to all followers; raises TimeoutError if there is no room within `wait_s` seconds.

    Raises `PeerLostError` if the message's formation is lost during the wait.
    """
    deadline_ns = host.now_ns() + int(wait_s * 1e9)
    while True:
        remaining_s = (deadline_ns - host.now_ns()) * 1e-9
        try:
            return queue.enqueue(message, timeout=max(0.0, min(remaining_s, LOSS_POLL_S)))
        except TimeoutError:
            if remaining_s <= LOSS_POLL_S:
                raise
        if is_lost():
            raise PeerLostError(message.formation)


def receive(queue: BroadcastQueue, wait_s: float) -> QueueMessage | None:
    """Return the next message, or None if none came within `wait_s` seconds."""
    try:
        message: QueueMessage = queue.dequeue(timeout=wait_s)
    except TimeoutError:
        return None
    return message

"""What a leader says to its followers, in order, on the group's shared-memory broadcast queue.

Every message carries the formation it belongs to; a follower drops those of another
one. Order is what makes switching safe: a leave message stands behind the last step, so no rank can
enter a collective that another will not enter. The payload of a step is opaque here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from comm_pool.formations import PeerLostError

FOLLOWER_POLL_S = 0.01
"""How long a joined follower waits for a step before it looks at its inbox again."""

LEADER_SEND_LIMIT_S = 30.0
"""A follower that reads nothing for this long is taken for lost."""


LOSS_POLL_S = 0.05
"""How often a leader that waits for room asks whether a follower was lost."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The formation serves: keep these lease indices, then lease this many more pages.

    `version` is the leader's last word on what it kept of the lease: with `kept` that is out of
    date. `is_busy`: steps follow at once, as the leader has tasks to go on with. `meets`: copies of
    the move that formed it may be under way, so members wait for each other's first.
    """

    formation: int
    kept: tuple[int, ...]
    grant_pages: int
    version: int = -1
    is_busy: bool = False
    meets: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Execute this step plan; one that is held, a little later (`worker.rank.deferred_step`)."""

    formation: int
    plan: Any
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """The leader has left; so may you.

    `kept` are the lease indices that its tasks still hold; None: the whole lease, for a move.
    """

    formation: int
    kept: tuple[int, ...] | None


QueueMessage = Begin | Step | LeaveGroup


class BroadcastQueue(Protocol):
    """The part of vLLM's `MessageQueue` that is used."""

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Block until there is room, or raise TimeoutError."""

    def dequeue(self, timeout: float | None = None) -> Any:
        """Block until there is a message, or raise TimeoutError."""


def send(
    queue: BroadcastQueue, message: QueueMessage, wait_s: float, is_lost: Callable[[], bool]
) -> None:
    """Tell all followers, or raise TimeoutError if there is no room within `wait_s` seconds.

    Raises `PeerLostError` while it waits if the message's formation is lost.
    """
    deadline = time.monotonic() + wait_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return queue.enqueue(message, timeout=max(0.0, min(left_s, LOSS_POLL_S)))
        except TimeoutError:
            if left_s <= LOSS_POLL_S:
                raise
        if is_lost():
            raise PeerLostError(message.formation)


def receive(queue: BroadcastQueue, wait_s: float) -> QueueMessage | None:
    """The next message, or None if none came within `wait_s` seconds."""
    try:
        message: QueueMessage = queue.dequeue(timeout=wait_s)
    except TimeoutError:
        return None
    return message

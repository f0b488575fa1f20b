"""What a leader says to its followers, in order, on the group's shared-memory broadcast queue.

Every message carries the formation (`born`) it belongs to; a follower drops those of another one.
Order is what makes switching safe: a leave message stands behind the last step, so no rank can
enter a collective that another will not enter. The payload of a step is opaque here.
"""

from dataclasses import dataclass
from typing import Any, Protocol

FOLLOWER_POLL_S = 0.01
"""How long a joined follower waits for a step before it looks at its inbox again."""

LEADER_SEND_LIMIT_S = 30.0
"""A follower that reads nothing for this long is taken for lost."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The formation serves: keep these lease indices, then lease this many more pages.

    `version` is the leader's last word on what it kept of the lease: with `kept` that is out of
    date. `is_busy`: steps follow at once, as the leader has tasks to go on with.
    """

    born: int
    kept: tuple[int, ...]
    grant_pages: int
    version: int = -1
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Execute this step plan."""

    born: int
    plan: Any


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """The leader has left; so may you.

    `kept` are the lease indices that its tasks still hold; None: the whole lease, for a move.
    """

    born: int
    kept: tuple[int, ...] | None


QueueMessage = Begin | Step | LeaveGroup


class BroadcastQueue(Protocol):
    """The part of vLLM's `MessageQueue` that is used."""

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Block until there is room, or raise TimeoutError."""

    def dequeue(self, timeout: float | None = None) -> Any:
        """Block until there is a message, or raise TimeoutError."""


def receive(queue: BroadcastQueue, wait_s: float) -> QueueMessage | None:
    """The next message, or None if none came within `wait_s` seconds."""
    try:
        message: QueueMessage = queue.dequeue(timeout=wait_s)
    except TimeoutError:
        return None
    return message

"""The outgoing queue of one session: bounded, and told to close exactly once.

Invariant: messages come out in the order they went in, and none after the closing. Called by the
core's owner, which puts, and by the session's stream, which takes; both on one event loop.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc

from coordinator.protocol.messages.message import Message

OUTGOING_MESSAGES_MAX = 16_384
"""Most unsent messages of a session; a peer further behind is cut off, and its next hello repairs
what it missed."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Why the coordinator ends a session."""

    code: grpc.StatusCode
    reason: str


ENDED = Closing(grpc.StatusCode.OK, "")
"""The peer left by itself."""


class Outbox:
    """What the coordinator still has to say to one peer."""

    def __init__(self, messages_max: int = OUTGOING_MESSAGES_MAX) -> None:
        self._messages_max = messages_max
        self._messages: deque[Message] = deque()
        self._closing: Closing | None = None
        self._changed = asyncio.Event()

    def put(self, message: Message) -> None:
        """Say `message` soon; one more than the limit closes the session."""
        if self._closing is not None:
            return
        if len(self._messages) >= self._messages_max:
            self._messages.clear()
            self.close(
                Closing(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"more than {self._messages_max} messages wait to be read: open a new session.",
                )
            )
            return
        self._messages.append(message)
        self._changed.set()

    def close(self, closing: Closing) -> None:
        """End the session after what was put already; the first closing counts."""
        if self._closing is None:
            self._closing = closing
            self._changed.set()

    async def take(self) -> Message | Closing:
        """Wait for the next message, or for the closing."""
        while not self._messages:
            if self._closing is not None:
                return self._closing
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

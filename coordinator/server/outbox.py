"""The outgoing queue of one session: bounded, and closed exactly once.

Invariant: messages leave in the order in which they entered, and none after the closing. The core
actor puts and the session's stream takes, both on one event loop.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc

from coordinator.protocol.messages.message import Message

OUTGOING_MESSAGES_MAX = 16_384
"""Most unsent messages of a session; a slower peer is cut off, and its next hello repairs what it
missed."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Why the coordinator ends a session."""

    code: grpc.StatusCode
    reason: str


ENDED = Closing(grpc.StatusCode.OK, "")
"""The peer ended the session itself."""


class Outbox:
    """The coordinator's unsent messages to one peer."""

    def __init__(self, messages_max: int = OUTGOING_MESSAGES_MAX) -> None:
        self._messages_max = messages_max
        self._messages: deque[Message] = deque()
        self._closing: Closing | None = None
        self._changed = asyncio.Event()

    def put(self, message: Message) -> None:
        """Queue `message`; one more than the limit closes the session."""
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
        """End the session after the queued messages; only the first closing counts."""
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

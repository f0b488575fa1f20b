"""The gateway's session with one coordinator: a bidirectional gRPC stream that reconnects.

A session is up from the coordinator's `Welcome` to the end of the stream. Messages sent while no
session is up are dropped: when the next one opens, the listener returns everything that still
matters, and that is sent first. Called by the process; knows nothing of tasks.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import grpc
import msgspec
import structlog

from coordinator.protocol import wire
from coordinator.protocol.cell_tls import CellTls
from coordinator.protocol.messages.gateway import GatewayDown, GatewayHello, GatewayUp, Welcome
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.metrics_wire import Measures
from gateway.relay.channel import open_channel

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 1.0
WELCOME_WAIT_S = 5.0
"""Longest wait for the coordinator's answer to a hello."""

OUTBOX_MESSAGES_MAX = 65_536
"""Most unsent messages; one more ends the session, and the next one sends the open tasks again."""

Outgoing = GatewayUp | Measures
Method = grpc.aio.StreamStreamMultiCallable[Outgoing, GatewayDown]

log = structlog.get_logger(__name__)


class SessionError(Exception):
    """The session cannot continue; the next one may."""


class Listener(Protocol):
    """Receives the session's events."""

    def session_opened(self) -> Iterable[GatewayUp]:
        """The coordinator answered; return the messages to send first."""

    def session_closed(self) -> None:
        """Nothing can be sent until the next session."""

    def on_coordinator_message(self, message: GatewayDown) -> None:
        """A message arrived."""


class _Outbox:
    """Unsent messages of one session; closed with it, so that the next one starts empty."""

    def __init__(self) -> None:
        self._messages: deque[Outgoing] = deque()
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self.overflowed = False

    def put(self, message: Outgoing) -> None:
        if len(self._messages) >= OUTBOX_MESSAGES_MAX:
            self.overflowed = True
        self._messages.append(message)
        self._empty.clear()
        self._changed.set()

    def close(self) -> None:
        self._messages.clear()
        self._empty.set()
        # A reader that still iterates waits forever; gRPC cancels it.

    async def wait_empty(self) -> None:
        await self._empty.wait()

    async def __aiter__(self) -> AsyncIterator[Outgoing]:
        while True:
            while self._messages:
                if self.overflowed:
                    raise SessionError
                yield self._messages.popleft()
            self._empty.set()
            self._changed.clear()
            await self._changed.wait()


class CoordinatorSession:
    """Keeps a session with one cell open until it is cancelled."""

    def __init__(self, address: str, token: str, gateway: str, tls: CellTls | None = None) -> None:
        self._address = address
        self._tls = tls
        self._metadata = ((wire.TOKEN_METADATA_KEY, token),)
        self._hello = GatewayHello(PROTOCOL_VERSION, gateway)
        self._outbox: _Outbox | None = None
        self.coordinator = ""
        """The coordinator that answered last."""

    @property
    def up(self) -> bool:
        """Whether messages can be sent."""
        return self._outbox is not None

    def send(self, message: Outgoing) -> None:
        """Send soon and in order; drop the message if the session is down."""
        if self._outbox is not None:
            self._outbox.put(message)

    async def flush(self) -> None:
        """Return when everything is sent, or no session is up."""
        if self._outbox is not None:
            await self._outbox.wait_empty()

    async def run(self, listener: Listener) -> None:
        """Open sessions until cancelled; the pause between them grows while none succeeds."""
        pause_s = BACKOFF_MIN_S
        while True:
            # A channel keeps the certificate with which it was opened.
            async with open_channel(self._address, self._tls) as channel:
                method = channel.stream_stream(
                    wire.GATEWAY_PATH,
                    request_serializer=wire.encode,
                    response_deserializer=wire.decode_gateway_down,
                )
                was_up = await self._run_once(method, listener)
            pause_s = BACKOFF_MIN_S if was_up else min(pause_s * 2, BACKOFF_MAX_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _run_once(self, method: Method, listener: Listener) -> bool:
        """Run one session from hello to end; return whether it was up."""
        outbox = _Outbox()
        outbox.put(self._hello)
        call = method(aiter(outbox), metadata=self._metadata)
        reason = "the coordinator ended it."
        try:
            await self._talk(aiter(call), outbox, listener)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (SessionError, TimeoutError, StopAsyncIteration, msgspec.MsgspecError) as error:
            reason = str(error) or type(error).__name__
        except asyncio.CancelledError:
            # If the writer fails, gRPC cancels the reader too.
            if not outbox.overflowed:
                raise
            reason = "the coordinator does not read."
        finally:
            was_up, self._outbox = self.up, None
            outbox.close()
            call.cancel()
            if was_up:
                listener.session_closed()
        log.warning("coordinator_session_closed", reason=reason, was_up=was_up)
        return was_up

    async def _talk(
        self, answers: AsyncIterator[GatewayDown], outbox: _Outbox, listener: Listener
    ) -> None:
        async with asyncio.timeout(WELCOME_WAIT_S):
            answer = await anext(answers)
        if not isinstance(answer, Welcome):
            raise SessionError("the coordinator did not answer the hello.")
        self._outbox = outbox
        self.coordinator = answer.coordinator
        for message in listener.session_opened():
            outbox.put(message)
        log.info("coordinator_session_opened", coordinator=answer.coordinator)
        async for incoming in answers:
            listener.on_coordinator_message(incoming)

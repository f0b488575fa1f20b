"""The gateway's session with the coordinator: one bidirectional gRPC stream, opened again and again.

A session is up between the coordinator's `Welcome` and the stream's end. The listener says what to
send first; messages sent while no session is up are dropped, because the listener says everything
that still matters when the next one opens. Called by the process; knows nothing of tasks.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import grpc
import structlog

from coordinator.protocol import wire
from coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    GatewayDown,
    GatewayHello,
    GatewayUp,
    Welcome,
)

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 1.0
WELCOME_WAIT_S = 5.0
"""How long the coordinator may take to answer a hello."""

OUTBOX_MESSAGES_MAX = 65_536
"""Most unsent messages; one more ends the session, and the next one starts from the book."""

Call = grpc.aio.StreamStreamCall[GatewayUp, GatewayDown]

log = structlog.get_logger(__name__)


class SessionError(Exception):
    """The session cannot go on; the next one may."""


class Listener(Protocol):
    """Whom the session tells what happens."""

    def session_opened(self, coordinator: str) -> Iterable[GatewayUp]:
        """The coordinator answered; return what it must know first."""

    def session_closed(self) -> None:
        """Nothing can be sent until the next session."""

    def coordinator_said(self, message: GatewayDown) -> None:
        """A message came."""


class CoordinatorSession:
    """Keeps a session open until it is cancelled."""

    def __init__(self, address: str, token: str, gateway: str) -> None:
        """Prepare; nothing happens before `run`."""
        self._address = address
        self._metadata = ((wire.TOKEN_METADATA_KEY, token),)
        self._gateway = gateway
        self._outbox: deque[GatewayUp] = deque()
        self._unsent = asyncio.Event()
        self.up = False
        """Whether messages can be sent."""

    def send(self, message: GatewayUp) -> None:
        """Send soon, in order, if the session is up."""
        if self.up:
            self._outbox.append(message)
            self._unsent.set()

    async def run(self, listener: Listener) -> None:
        """Open sessions until cancelled, each after a pause that grows while none succeeds."""
        pause_s = BACKOFF_MIN_S
        async with grpc.aio.insecure_channel(
            self._address, options=wire.CHANNEL_OPTIONS
        ) as channel:
            while True:
                was_up = await self._run_once(channel, listener)
                pause_s = BACKOFF_MIN_S if was_up else min(pause_s * 2, BACKOFF_MAX_S)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _run_once(self, channel: grpc.aio.Channel, listener: Listener) -> bool:
        open_call = channel.stream_stream(
            wire.GATEWAY_PATH,
            request_serializer=wire.encode,
            response_deserializer=wire.decode_gateway_down,
        )
        call: Call = open_call(metadata=self._metadata)
        was_up = False
        try:
            coordinator = await self._greet(call)
            was_up = self.up = True
            for message in listener.session_opened(coordinator):
                self.send(message)
            log.info("coordinator_session_opened", coordinator=coordinator)
            await self._talk(call, listener)
        except (grpc.aio.AioRpcError, SessionError, TimeoutError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            log.warning("coordinator_session_closed", reason=reason, was_up=was_up)
        finally:
            call.cancel()
            self.up = False
            self._outbox.clear()
            if was_up:
                listener.session_closed()
        return was_up

    async def _greet(self, call: Call) -> str:
        async with asyncio.timeout(WELCOME_WAIT_S):
            await call.write(GatewayHello(PROTOCOL_VERSION, self._gateway))
            answer = await call.read()
        if not isinstance(answer, Welcome):
            raise SessionError("the coordinator did not answer the hello.")
        return answer.coordinator

    async def _talk(self, call: Call, listener: Listener) -> None:
        """Write and read until either ends; the other is stopped."""
        writer = asyncio.create_task(self._write(call))
        try:
            reader = asyncio.create_task(self._read(call, listener))
            try:
                await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _stop(reader)
        finally:
            await _stop(writer)
        for task in (writer, reader):
            if not task.cancelled():
                task.result()

    async def _write(self, call: Call) -> None:
        while True:
            while self._outbox:
                if len(self._outbox) > OUTBOX_MESSAGES_MAX:
                    raise SessionError("the coordinator does not read.")
                await call.write(self._outbox.popleft())
            self._unsent.clear()
            await self._unsent.wait()

    async def _read(self, call: Call, listener: Listener) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            listener.coordinator_said(message)
        raise SessionError("the coordinator ended the session.")


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancel and wait; its own error stays in it."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task

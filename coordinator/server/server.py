"""The gRPC server of a cell: sessions of ranks, of gateways and of launchers.

Every session starts with the shared token and a hello of the right version. A second session of the
same rank or gateway replaces the first. Messages of peers become events, and messages of the core
leave through the session's outbox. Decides nothing about ranks, tasks or layouts.
"""

import asyncio
import functools
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import msgspec
import structlog

from comm_pool.layout import Rank
from coordinator.model.events import (
    Event,
    GatewayClosed,
    GatewayOpened,
    GatewaySent,
    RankClosed,
    RankExited,
    RankOpened,
    RankReported,
)
from coordinator.protocol import wire
from coordinator.protocol.cell_tls import CellTls
from coordinator.protocol.messages.gateway import BatchesRun, GatewayFiles, GatewayHello
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.metrics_wire import Measures
from coordinator.server.core_actor import CoreActor
from coordinator.server.credentials import server_credentials
from coordinator.server.outbox import ENDED, Closing, Outbox
from coordinator.telemetry.metrics_aggregator import MetricsAggregator
from coordinator.telemetry.usage_history import UsageHistory

log = structlog.get_logger()

GATEWAYS_MAX = 256
"""Gateways with an open session, at most."""
HELLO_LIMIT_S = 30.0
"""How long a peer may take for its hello; a rank sends it between two steps."""
STOP_GRACE_S = 1.0
"""How long open sessions may take to end when the server stops."""

Context = grpc.aio.ServicerContext[bytes, bytes]
Key = TypeVar("Key", Rank, str)
Decoded = TypeVar("Decoded")

REPLACED = Closing(grpc.StatusCode.ABORTED, "a newer session of the same peer took over.")


STOPPING = Closing(
    grpc.StatusCode.UNAVAILABLE, "the coordinator stops: open a session with the next one."
)


class ListenError(Exception):
    """The server cannot listen on the address; the message is one sentence that says what to do."""


class RefusedError(Exception):
    """A session cannot be opened or continued; the peer receives the reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.closing = Closing(code, reason)


@dataclass(frozen=True, slots=True)
class _Session:
    """An open session: its outgoing queue, and the handlers of its messages and its end."""

    outbox: Outbox
    hear: Callable[[bytes], Awaitable[None]]
    close: Callable[[], None]


class CellServer:
    """Opens sessions for ranks 0 to world-1, for gateways and for launchers with the token."""

    def __init__(
        self,
        owner: CoreActor,
        token: str,
        world: int,
        usage: UsageHistory | None = None,
        tls: CellTls | None = None,
    ) -> None:
        self._owner = owner
        self._token = token.encode()
        self._world = world
        self._tls = tls
        self._incarnations: dict[Rank, int] = {}
        self._ended: dict[Rank, int] = {}
        """The newest ended process of each rank, as reported by a launcher."""
        self.aggregator = MetricsAggregator(usage, time.time)
        """The gateways' measurements; the core does not use them."""
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> int:
        """Listen on `host:port`; returns the port, which is chosen for port 0."""
        # Without SO_REUSEPORT: a second coordinator on the port must fail, not share it.
        server = grpc.aio.server(options=[*wire.CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        handlers = {
            wire.RANK_METHOD: grpc.stream_stream_rpc_method_handler(self._rank_session),
            wire.GATEWAY_METHOD: grpc.stream_stream_rpc_method_handler(self._gateway_session),
            wire.LAUNCHER_METHOD: grpc.stream_stream_rpc_method_handler(self._launcher_session),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, handlers),)
        )
        try:
            if self._tls is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, server_credentials(self._tls))
        except RuntimeError as error:
            raise ListenError(
                f"cannot listen on {listen}: stop what uses the port, or set coordinator.listen to "
                "a free one."
            ) from error
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """End all sessions; peers connect to the next coordinator by themselves."""
        owner = self._owner
        peers = *owner.rank_outboxes.values(), *owner.gateway_outboxes.values()
        for outbox in (*peers, *owner.launcher_outboxes):
            outbox.close(STOPPING)
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    async def _rank_session(self, _: object, context: Context) -> None:
        await self._session(context, self._open_rank)

    async def _gateway_session(self, _: object, context: Context) -> None:
        await self._session(context, self._open_gateway)

    async def _launcher_session(self, _: object, context: Context) -> None:
        await self._session(context, self._open_launcher)

    async def _session(
        self, context: Context, open_session: Callable[[bytes], Awaitable[_Session]]
    ) -> None:
        """Open a session and send the coordinator's messages until either side ends it."""
        try:
            self._authenticate(context)
            session = await open_session(await _hello(context))
        except RefusedError as refused:
            log.warning("session_refused", peer=context.peer(), reason=str(refused))
            await context.abort(refused.closing.code, refused.closing.reason)
        listener = asyncio.create_task(_listen(context, session))
        try:
            while not isinstance(item := await session.outbox.take(), Closing):
                await context.write(wire.encode(item))
        finally:
            session.close()
            listener.cancel()
        if item is not ENDED:
            log.warning("session_closed", peer=context.peer(), reason=item.reason)
            await context.abort(item.code, item.reason)

    def _authenticate(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get(wire.TOKEN_METADATA_KEY, "")
        presented = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(presented, self._token):
            raise RefusedError(
                grpc.StatusCode.UNAUTHENTICATED,
                "the shared token is wrong or missing: give every process of the cell the same "
                "AILERON_TOKEN.",
            )

    async def _open_rank(self, raw: bytes) -> _Session:
        hello = _decode(wire.decode_rank_up, raw)
        if not isinstance(hello, RankHello):
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, "start a rank's session with a hello."
            )
        _require_version(hello.version)
        rank = hello.rank
        if not 0 <= rank < self._world:
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"rank {rank} does not exist: the cell has ranks 0 to {self._world - 1}.",
            )
        if hello.incarnation < self._incarnations.get(rank, 0):
            raise RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a newer process took the place of rank {rank}: end this one.",
            )
        if hello.incarnation <= self._ended.get(rank, -1):
            raise RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the launcher reported the end of this process of rank {rank}: end it.",
            )
        self._incarnations[rank] = hello.incarnation

        def read(message: bytes) -> Event:
            report = _decode(wire.decode_rank_up, message)
            if not isinstance(report, Report) or report.rank != rank:
                raise RefusedError(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"send only reports of rank {rank} in its session.",
                )
            return RankReported(rank, report)

        closed = RankClosed(rank, hello.incarnation)
        return await self._open(self._owner.rank_outboxes, rank, RankOpened(hello), read, closed)

    async def _open_launcher(self, raw: bytes) -> _Session:
        async def hear(message: bytes) -> None:
            report = _decode(wire.decode_launcher_up, message)
            _require_version(report.version)
            for rank, incarnation in report.ended:
                if 0 <= rank < self._world and incarnation > self._ended.get(rank, -1):
                    self._ended[rank] = incarnation
                    exited = RankExited(rank, is_at_fault=rank not in report.without_fault)
                    await self._owner.post(
                        exited, functools.partial(self._is_newest, rank, incarnation)
                    )

        outbox = Outbox()
        await hear(raw)
        launchers = self._owner.launcher_outboxes
        launchers.add(outbox)
        return _Session(outbox, hear, lambda: launchers.discard(outbox))

    def _is_newest(self, rank: Rank, incarnation: int) -> bool:
        return self._incarnations.get(rank) == incarnation

    async def _open_gateway(self, raw: bytes) -> _Session:
        hello = _decode(wire.decode_gateway_up, raw)
        if not isinstance(hello, GatewayHello):
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, "start a gateway's session with a hello."
            )
        _require_version(hello.version)
        gateway, outboxes = hello.gateway, self._owner.gateway_outboxes
        if gateway not in outboxes and len(outboxes) >= GATEWAYS_MAX:
            raise RefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{GATEWAYS_MAX} gateways are connected, the most that a cell serves: end one.",
            )

        self._owner.batches.pop(gateway, None)
        self._owner.gateway_files.pop(gateway, None)

        def read(message: bytes) -> Event | None:
            update = _decode(wire.decode_gateway_up, message)
            if isinstance(update, Measures):
                self.aggregator.take(gateway, update)
                return None
            if isinstance(update, GatewayHello):
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "send one hello in a session.")
            if isinstance(update, BatchesRun):
                self._owner.batches[gateway] = update.batches
                return None
            if isinstance(update, GatewayFiles):
                self._owner.gateway_files[gateway] = update
                return None
            return GatewaySent(gateway, update)

        closed = GatewayClosed(gateway)
        for gone in self._owner.batches.keys() - outboxes.keys():
            del self._owner.batches[gone]
        for gone in self._owner.gateway_files.keys() - outboxes.keys():
            del self._owner.gateway_files[gone]
        return await self._open(outboxes, gateway, GatewayOpened(hello), read, closed)

    async def _open(
        self,
        outboxes: dict[Key, Outbox],
        key: Key,
        opened: Event,
        read: Callable[[bytes], Event | None],
        closed: Event,
    ) -> _Session:
        """Give `key` a new outbox in the step in which the core handles `opened`."""
        outbox = Outbox()
        owner = self._owner

        def take_over() -> bool:
            if (earlier := outboxes.get(key)) is not None:
                earlier.close(REPLACED)
            outboxes[key] = outbox
            return True

        def is_current() -> bool:
            return outboxes.get(key) is outbox

        def give_up() -> bool:
            return is_current() and outboxes.pop(key) is outbox

        async def hear(message: bytes) -> None:
            if (event := read(message)) is not None:
                await owner.post(event, is_current)

        await owner.post(opened, take_over)
        return _Session(outbox, hear, lambda: owner.post_soon(closed, give_up))


async def _hello(context: Context) -> bytes:
    try:
        async with asyncio.timeout(HELLO_LIMIT_S):
            raw = await context.read()
    except TimeoutError:
        raise RefusedError(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"send a hello within {HELLO_LIMIT_S:.0f} s."
        ) from None
    if not isinstance(raw, bytes):
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "start a session with a hello.")
    return raw


async def _listen(context: Context, session: _Session) -> None:
    """Handle the peer's messages until it ends the session or breaks the protocol."""
    closing = ENDED
    try:
        while isinstance(raw := await context.read(), bytes):
            await session.hear(raw)
    except RefusedError as refused:
        closing = refused.closing
    finally:
        session.outbox.close(closing)


def _decode(decoder: Callable[[bytes], Decoded], raw: bytes) -> Decoded:
    try:
        return decoder(raw)
    except msgspec.DecodeError as error:
        raise RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"a message cannot be read ({error}): run the same version of aileron everywhere.",
        ) from error


def _require_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise RefusedError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the peer speaks protocol version {version}, this coordinator {PROTOCOL_VERSION}: "
            "run the same version of aileron everywhere.",
        )

"""The gRPC server of a cell: one session per rank and per gateway.

Every session starts with the shared token and a hello of the right version; a second session of
the same rank or gateway replaces the first. What peers say becomes events, what the core says
leaves through the session's outbox. Decides nothing about ranks, tasks or layouts.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import msgspec
import structlog

from comm_pool.layout import Rank
from coordinator.events import (
    GatewayClosed,
    GatewayOpened,
    GatewaySaid,
    RankClosed,
    RankOpened,
    RankSaid,
)
from coordinator.outbox import ENDED, Closing, Outbox
from coordinator.owner import CoreOwner
from coordinator.protocol import wire
from coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    GatewayHello,
    RankHello,
    Report,
)

log = structlog.get_logger()

GATEWAYS_MAX = 64
"""Most gateways with an open session."""
HELLO_LIMIT_S = 5.0
"""How long a peer may take to say hello."""
STOP_GRACE_S = 1.0
"""How long open sessions may take to end when the server stops."""

Requests = AsyncIterator[bytes]
Context = grpc.aio.ServicerContext[bytes, bytes]

REPLACED = Closing(grpc.StatusCode.ABORTED, "a newer session of the same peer took over.")


class ListenError(Exception):
    """The address cannot be listened on; the message is one sentence that says what to do."""


class Refused(Exception):
    """A session cannot be opened or go on; the peer is told why."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.closing = Closing(code, reason)


@dataclass(frozen=True, slots=True)
class _Session:
    """An open session: its outgoing queue, and what to do with what comes in and at the end."""

    outbox: Outbox
    hear: Callable[[bytes], Awaitable[None]]
    close: Callable[[], None]


class CellServer:
    """Opens sessions for the ranks 0..world-1 and for gateways that know the token."""

    def __init__(self, owner: CoreOwner, token: str, world: int) -> None:
        self._owner = owner
        self._token = token.encode()
        self._world = world
        self._incarnations: dict[Rank, int] = {}
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> int:
        """Listen on `host:port`; returns the port, which is chosen for port 0."""
        # Without SO_REUSEPORT: a second coordinator on the port must fail, not share it.
        server = grpc.aio.server(options=[*wire.CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        handlers = {
            wire.RANK_METHOD: grpc.stream_stream_rpc_method_handler(self._rank_session),
            wire.GATEWAY_METHOD: grpc.stream_stream_rpc_method_handler(self._gateway_session),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, handlers),)
        )
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as error:
            raise ListenError(
                f"cannot listen on {listen}: stop what uses the port, or set coordinator.listen to "
                "a free one."
            ) from error
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """End all sessions; peers come back to the next coordinator by themselves."""
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    async def _rank_session(self, requests: Requests, context: Context) -> AsyncIterator[bytes]:
        async for message in self._session(requests, context, self._open_rank):
            yield message

    async def _gateway_session(self, requests: Requests, context: Context) -> AsyncIterator[bytes]:
        async for message in self._session(requests, context, self._open_gateway):
            yield message

    async def _session(
        self,
        requests: Requests,
        context: Context,
        open_session: Callable[[bytes], Awaitable[_Session]],
    ) -> AsyncIterator[bytes]:
        """Open a session and yield what the coordinator says until either side ends it."""
        try:
            self._authenticate(context)
            session = await open_session(await _first(requests))
        except Refused as refused:
            log.warning("session_refused", peer=context.peer(), reason=str(refused))
            await context.abort(refused.closing.code, refused.closing.reason)
        listener = asyncio.create_task(_listen(requests, session))
        try:
            while not isinstance(said := await session.outbox.take(), Closing):
                yield wire.encode(said)
        finally:
            listener.cancel()
            session.close()
        if said is not ENDED:
            log.warning("session_closed", peer=context.peer(), reason=said.reason)
            await context.abort(said.code, said.reason)

    def _authenticate(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get(wire.TOKEN_METADATA_KEY, "")
        presented = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(presented, self._token):
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED,
                "the shared token is wrong or missing: give every process of the cell the same "
                "AILERON_TOKEN.",
            )

    async def _open_rank(self, raw: bytes) -> _Session:
        hello = _decode(wire.decode_rank_up, raw)
        if not isinstance(hello, RankHello):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "a rank's session starts with a hello.")
        _require_version(hello.version)
        rank, incarnation = hello.rank, hello.incarnation
        if not 0 <= rank < self._world:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"rank {rank} does not exist: the cell has ranks 0 to {self._world - 1}.",
            )
        if incarnation < self._incarnations.get(rank, 0):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a newer process took the place of rank {rank}: end this one.",
            )
        self._incarnations[rank] = incarnation
        outbox = Outbox()
        owner = self._owner

        def register() -> None:
            _replace(owner.rank_outboxes, rank, outbox)

        async def hear(message: bytes) -> None:
            report = _decode(wire.decode_rank_up, message)
            if not isinstance(report, Report) or report.rank != rank:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"only reports of rank {rank} belong into its session.",
                )
            if owner.rank_outboxes.get(rank) is outbox:
                await owner.post(RankSaid(rank, report))

        def close() -> None:
            if owner.rank_outboxes.get(rank) is outbox:
                del owner.rank_outboxes[rank]
                owner.post_soon(RankClosed(rank, incarnation))

        await owner.post(RankOpened(hello), register)
        return _Session(outbox, hear, close)

    async def _open_gateway(self, raw: bytes) -> _Session:
        hello = _decode(wire.decode_gateway_up, raw)
        if not isinstance(hello, GatewayHello):
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, "a gateway's session starts with a hello."
            )
        _require_version(hello.version)
        gateway = hello.gateway
        owner = self._owner
        if gateway not in owner.gateway_outboxes and len(owner.gateway_outboxes) >= GATEWAYS_MAX:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{GATEWAYS_MAX} gateways are connected, which is the most a cell serves.",
            )
        outbox = Outbox()

        def register() -> None:
            _replace(owner.gateway_outboxes, gateway, outbox)

        async def hear(message: bytes) -> None:
            said = _decode(wire.decode_gateway_up, message)
            if isinstance(said, GatewayHello):
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "a session has one hello.")
            if owner.gateway_outboxes.get(gateway) is outbox:
                await owner.post(GatewaySaid(gateway, said))

        def close() -> None:
            if owner.gateway_outboxes.get(gateway) is outbox:
                del owner.gateway_outboxes[gateway]
                owner.post_soon(GatewayClosed(gateway))

        await owner.post(GatewayOpened(hello), register)
        return _Session(outbox, hear, close)

"""Ranks without an engine: real seats of the switch protocol over real gRPC sessions.

Each does what it is told at once and holds no tasks. The leave message that a leader sends its
followers over the step queue is a call here.
"""

import asyncio
import time
from typing import Any, Self

import grpc

from comm_pool.layout import Mode, Rank
from coordinator.protocol import wire
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import Directive, PageReport, RankHello, Report
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.protocol.switch_actions import Leave
from coordinator.protocol.switch_participant import SwitchParticipant

PAGES = 64
AIO: Any = grpc.aio


class RankSessions:
    """All ranks of a cell, in the test's event loop."""

    def __init__(
        self,
        target: str,
        token: str,
        world: int,
        *,
        incarnation: int = 1,
        heartbeat_s: float = 0.02,
    ) -> None:
        self._target = target
        self._heartbeat_s = heartbeat_s
        self._metadata = ((wire.TOKEN_METADATA_KEY, token),)
        self._incarnation = incarnation
        self.participants = {
            Rank(rank): SwitchParticipant(Rank(rank), incarnation) for rank in range(world)
        }
        self.obeys = True
        """Whether directives are carried out; heartbeats go on either way."""
        self.blocks_used = 0
        """Of each rank's blocks, as it says while it serves."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(rank)) for rank in self.participants]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self, rank: int) -> None:
        """End one rank's session and start no other."""
        self._tasks[rank].cancel()

    async def _run(self, rank: Rank) -> None:
        """Keep a session open, as a rank does."""
        while True:
            try:
                await self._session(rank)
            except (AIO.AioRpcError, asyncio.InvalidStateError):
                await asyncio.sleep(0.02)

    async def _session(self, rank: Rank) -> None:
        async with AIO.insecure_channel(self._target, options=wire.CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(
                wire.RANK_PATH,
                request_serializer=wire.encode,
                response_deserializer=wire.decode_rank_down,
            )(metadata=self._metadata)
            await call.write(self._hello(rank))
            # Two writes at once would end the session.
            lock = asyncio.Lock()
            beat = asyncio.create_task(self._beat(call, rank, lock))
            try:
                while (message := await call.read()) is not AIO.EOF:
                    if isinstance(message, Directive) and self.obeys:
                        self.participants[rank].on_directive(message)
                        await self._tell(call, rank, lock)
            finally:
                beat.cancel()

    async def _beat(self, call: Any, rank: Rank, lock: asyncio.Lock) -> None:
        while True:
            await self._tell(call, rank, lock)
            await asyncio.sleep(self._heartbeat_s)

    async def _tell(self, call: Any, rank: Rank, lock: asyncio.Lock) -> None:
        async with lock:
            self._move(rank)
            await call.write(self._report(rank))

    def _move(self, rank: Rank) -> None:
        participant = self.participants[rank]
        while (move := participant.next_move(idle=True)) is not None:
            if isinstance(move, Leave) and move.is_leader:
                for member in move.binding.group.ranks:
                    if member != rank:
                        self.participants[member].on_leave(move.binding.formation)
            participant.made(move)

    def _hello(self, rank: Rank) -> RankHello:
        return RankHello(
            version=PROTOCOL_VERSION,
            rank=rank,
            incarnation=self._incarnation,
            pid=1000 + rank,
            device="cpu",
            widths=(1, 2, 4),
            max_tasks=8,
            max_model_len_tokens=512,
            tokens_per_slot=16,
            kv_heads=4,
            pages_total=PAGES,
            held=(),
            memory=(("weights", 9_000_000),),
            step_times=(WidthTimes(1, ((Mode.DP, ((1, 900), (512, 4_000))),)),),
        )

    def _report(self, rank: Rank) -> Report:
        participant = self.participants[rank]
        return Report(
            rank=rank,
            incarnation=self._incarnation,
            sent_at_ms=time.monotonic_ns() // 1_000_000,
            stage=participant.stage,
            binding=participant.binding,
            target=participant.target,
            pages=_pages(participant),
            blocks_free=PAGES - self.blocks_used if participant.serving else 0,
            blocks_total=PAGES if participant.serving else 0,
        )


def _pages(participant: SwitchParticipant) -> PageReport:
    """All pages belong to the group while it serves."""
    if not participant.serving or participant.binding is None:
        return PageReport(total=PAGES, free=PAGES, owned=0, leased=0)
    alone = participant.binding.group.width == 1
    return PageReport(PAGES, 0, owned=PAGES if alone else 0, leased=0 if alone else PAGES)

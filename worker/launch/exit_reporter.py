"""Reports ended ranks to the coordinator, and passes its restart orders to the launcher.

The launcher forks ranks repeatedly, so it must not have the threads of a gRPC client. It writes
the status of its ranks into a pipe. This process holds the session and repeats the whole status in
each new one. It also sees that a rank is about to end, long before the launcher learns of its end.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc
import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.cell_tls import CellTls
from coordinator.protocol.messages.launcher import RanksEnded, RenewRanks
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.wire import (
    LAUNCHER_PATH,
    TOKEN_METADATA_KEY,
    decode_launcher_down,
    encode,
)
from worker.io.channel import open_channel
from worker.launch.life_locks import LifeLocks

RECONNECT_S = 0.2
"""Pause between two attempts to reach the coordinator."""

LOOK_S = 0.01
"""Pause between two looks at the locks that ranks hold while they live."""

PIPE_BYTES = 65_536


class ProcessStatus(msgspec.Struct, frozen=True):
    """The launcher's view of its ranks' processes, as (rank, incarnation)."""

    ended: tuple[tuple[Rank, int], ...] = ()
    """The newest process of each rank that has ended."""
    newest: tuple[tuple[Rank, int], ...] = ()
    """The newest process of each rank, running or not."""
    without_fault: tuple[Rank, ...] = ()
    """Ranks whose ended process ended on demand, or with a peer it cannot serve without."""
    falling: tuple[Rank, ...] = ()
    """Ranks whose end would be no fault by now, for the same reasons."""
    block: int = 1
    """Aligned ranks of this number cannot serve without each other."""


_decode_status = msgspec.json.Decoder(ProcessStatus).decode


class ExitPipe:
    """The launcher's end of the pipe; `send` never blocks."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def send(self, status: ProcessStatus) -> None:
        """Replace the last status; if the exit reporter does not read, the next call sends it."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.writer, msgspec.json.encode(status) + b"\n")

    def close(self) -> None:
        """Close both ends in this process."""
        os.close(self.reader)
        os.close(self.writer)


class OrderPipe:
    """Names the ranks to restart; the exit reporter writes, then sends the launcher SIGUSR1."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def order(self, ranks: tuple[Rank, ...]) -> None:
        """Write an order; hardly ever blocks, as the launcher reads the pipe at each signal."""
        os.write(self.writer, msgspec.json.encode(ranks) + b"\n")

    def take(self) -> list[tuple[Rank, ...]]:
        """Return the orders since the last call."""
        with suppress(BlockingIOError):
            lines = os.read(self.reader, PIPE_BYTES).splitlines()
            return [msgspec.json.decode(line, type=tuple[Rank, ...]) for line in lines]
        return []

    def close(self) -> None:
        """Close both ends in this process."""
        os.close(self.reader)
        os.close(self.writer)


Renew = Callable[[tuple[Rank, ...]], None]
"""Orders a restart of these ranks together."""


def run_exit_reporter(
    target: str,
    token: str,
    reader: int,
    renew: Renew,
    lives: LifeLocks,
    tls: CellTls | None = None,
) -> None:
    """Hold a session with the coordinator at `target` until the pipe ends."""
    asyncio.run(_ExitReporter(target, token, reader, renew, lives, tls).run())


class _ExitReporter:
    def __init__(
        self,
        target: str,
        token: str,
        reader: int,
        renew: Renew,
        lives: LifeLocks,
        tls: CellTls | None = None,
    ) -> None:
        self._target = target
        self._tls = tls
        self._lives = lives
        self._token = token
        self._reader = reader
        self._rest = b""
        self._renew = renew
        self._status = ProcessStatus()
        self._ending: dict[Rank, tuple[int, bool]] = {}
        """The newest process of each rank that was seen to end, and whether without fault."""
        self._changed = asyncio.Event()
        self._closing = False

    async def run(self) -> None:
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        watch = asyncio.create_task(self._watch())
        while not self._closing:
            with suppress(grpc.aio.AioRpcError):
                await self._one_session()
            if not self._closing:
                await asyncio.sleep(RECONNECT_S)
        watch.cancel()

    async def _watch(self) -> None:
        while not self._closing:
            if any(self._lives.is_ending(rank) for rank, _ in self._status.newest):
                # The launcher says whom it ends before it does.
                self._read()
                self._note_ending()
            await asyncio.sleep(LOOK_S)

    def _note_ending(self) -> None:
        for rank, incarnation in self._status.newest:
            known = self._ending.get(rank, (-1, False))[0]
            if incarnation > known and self._lives.is_ending(rank):
                is_without_fault = rank in self._status.falling or self._falls_with_peer(rank)
                self._ending[rank] = incarnation, is_without_fault
                self._changed.set()

    def _falls_with_peer(self, rank: Rank) -> bool:
        """Return whether a peer that the rank cannot serve without ends, or has ended."""
        status, first = self._status, rank - rank % self._status.block
        newest, ended = dict(status.newest), dict(status.ended)
        peers = {Rank(first + place) for place in range(status.block)} - {rank}
        return any(
            max(ended.get(peer, -1), self._ending.get(peer, (-1, False))[0]) == newest[peer]
            for peer in peers & newest.keys()
        )

    def _read(self) -> None:
        try:
            data = os.read(self._reader, PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._closing = True
            asyncio.get_running_loop().remove_reader(self._reader)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._status = _decode_status(lines[-1])
        self._changed.set()

    async def _one_session(self) -> None:
        async with open_channel(self._target, self._tls) as channel:
            method = channel.stream_stream(
                LAUNCHER_PATH, request_serializer=encode, response_deserializer=None
            )
            call = method(self._statuses(), metadata=((TOKEN_METADATA_KEY, self._token),))
            async for message in call:
                self._obey(decode_launcher_down(message))

    def _obey(self, wanted: RenewRanks) -> None:
        """Order a restart of these ranks, unless they have been restarted since the request."""
        if wanted.ranks and set(wanted.ranks) <= set(self._status.newest):
            self._renew(tuple(sorted(rank for rank, _ in wanted.ranks)))

    async def _statuses(self) -> AsyncIterator[RanksEnded]:
        while not self._closing:
            self._changed.clear()
            yield self._report()
            await self._changed.wait()

    def _report(self) -> RanksEnded:
        """Return the newest process of each rank that has ended or is ending."""
        ended, without_fault = dict(self._status.ended), set(self._status.without_fault)
        for rank, (incarnation, is_without_fault) in self._ending.items():
            if incarnation > ended.get(rank, -1):
                ended[rank] = incarnation
                without_fault.discard(rank)
                without_fault |= {rank} if is_without_fault else set()
        return RanksEnded(
            PROTOCOL_VERSION, tuple(sorted(ended.items())), tuple(sorted(without_fault))
        )

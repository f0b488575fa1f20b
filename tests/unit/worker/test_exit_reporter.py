"""The exit reporter says which ranks end, in each session, and passes on that all start again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from comm_pool.layout import Rank
from coordinator.protocol import wire
from coordinator.protocol.messages.launcher import RanksEnded, RenewRanks
from worker.launch.exit_reporter import ExitPipe, ProcessStatus, _ExitReporter
from worker.launch.life_locks import LifeLocks

TOKEN = "a-token"
LIMIT_S = 20
NEWEST = ((Rank(0), 4), (Rank(1), 7))


class Coordinator:
    """The coordinator's side of a launcher's sessions."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[RanksEnded] = asyncio.Queue()
        self.call: grpc.aio.ServicerContext[Any, Any] | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.LAUNCHER_METHOD: handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _session(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        assert dict(context.invocation_metadata() or ())[wire.TOKEN_METADATA_KEY] == TOKEN
        self.call = context
        while isinstance(raw := await context.read(), bytes):
            self.heard.put_nowait(wire.decode_launcher_up(raw))

    async def next(self) -> RanksEnded:
        async with asyncio.timeout(LIMIT_S):
            return await self.heard.get()

    async def say(self, wanted: RenewRanks) -> None:
        assert self.call is not None
        await self.call.write(wire.encode(wanted))


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    made = Coordinator()
    await made.start()
    yield made
    await made.stop()


async def test_what_ended_goes_up_and_what_is_to_start_again_comes_down(
    coordinator: Coordinator,
) -> None:
    pipe, renewed = ExitPipe(), asyncio.Queue[tuple[Rank, ...]]()
    target = f"127.0.0.1:{coordinator.port}"
    reporter = _ExitReporter(target, TOKEN, pipe.reader, renewed.put_nowait, LifeLocks(2))
    running = asyncio.create_task(reporter.run())
    pipe.send(ProcessStatus(newest=NEWEST))
    while (await coordinator.next()).ended:
        pass
    pipe.send(ProcessStatus(((Rank(1), 6),), NEWEST, (Rank(1),)))
    while not (said := await coordinator.next()).ended:
        pass
    assert said.ended == ((1, 6),)
    assert said.without_fault == (1,)
    await coordinator.say(RenewRanks(((Rank(0), 4), (Rank(1), 6))))
    await coordinator.say(RenewRanks(()))
    await coordinator.say(RenewRanks(NEWEST[:1]))
    await coordinator.say(RenewRanks(tuple(reversed(NEWEST))))
    async with asyncio.timeout(LIMIT_S):
        assert await renewed.get() == (0,), "those of a group"
        assert await renewed.get() == (0, 1)
    await asyncio.sleep(0.1)
    assert renewed.empty(), "only the processes that run now were meant"
    os.close(pipe.writer)
    await coordinator.stop()
    async with asyncio.timeout(LIMIT_S):
        await running
    os.close(pipe.reader)


def child_holding(lives: LifeLocks, rank: Rank, *, releases: bool = False) -> int:
    """Fork a process that holds the lock until it is ended, or releases it and ends."""
    lives.renew(rank)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        lives.hold(rank)
        os.write(writer, b"h")
        if releases:
            lives.release(rank)
            os._exit(0)
        signal.pause()
    assert os.read(reader, 1) == b"h"
    os.close(reader)
    os.close(writer)
    return pid


@asynccontextmanager
async def two_ranks(coordinator: Coordinator) -> AsyncIterator[tuple[ExitPipe, list[int]]]:
    """An exit reporter that watches two processes, whose ends nobody awaits in the block."""
    lives, pipe = LifeLocks(2), ExitPipe()
    pids = [child_holding(lives, rank) for rank in (Rank(0), Rank(1))]
    target = f"127.0.0.1:{coordinator.port}"
    running = asyncio.create_task(
        _ExitReporter(target, TOKEN, pipe.reader, lambda _: None, lives).run()
    )
    yield pipe, pids
    os.close(pipe.writer)
    await coordinator.stop()
    async with asyncio.timeout(LIMIT_S):
        await running
    os.close(pipe.reader)
    for pid in pids:
        os.waitpid(pid, 0)


async def test_a_rank_whose_end_has_begun_is_reported_before_the_launcher_knows(
    coordinator: Coordinator,
) -> None:
    async with two_ranks(coordinator) as (pipe, pids):
        pipe.send(ProcessStatus(((Rank(1), 6),), NEWEST, (Rank(1),)))
        while (said := await coordinator.next()).ended != ((1, 6),):
            assert not said.ended
        os.kill(pids[1], signal.SIGKILL)  # Nobody waits for it: it stays a zombie.
        said = await coordinator.next()
        assert said.ended == ((1, 7),)
        assert said.without_fault == ()
        pipe.send(ProcessStatus(((Rank(1), 7),), NEWEST, (), (Rank(0),)))
        os.kill(pids[0], signal.SIGKILL)
        while len((said := await coordinator.next()).ended) < 2:
            pass
        assert said.ended == ((0, 4), (1, 7))
        assert said.without_fault == (0,), "the launcher had said that it ends it"


def test_a_process_that_ends_as_asked_to_is_not_seen_to_end() -> None:
    lives = LifeLocks(2)
    os.waitpid(child_holding(lives, Rank(1), releases=True), 0)
    assert not lives.is_ending(Rank(1))
    killed = child_holding(lives, Rank(1))
    assert not lives.is_ending(Rank(1))
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert lives.is_ending(Rank(1))
    assert not lives.is_ending(Rank(0))
    alive = child_holding(lives, Rank(1))
    assert not lives.is_ending(Rank(1)), "the next process lives"
    os.kill(alive, signal.SIGKILL)
    os.waitpid(alive, 0)


async def test_who_falls_with_a_peer_that_ends_is_not_at_fault(coordinator: Coordinator) -> None:
    """The launcher hears of the first one only when its memory is free."""
    async with two_ranks(coordinator) as (pipe, pids):
        pipe.send(ProcessStatus(newest=NEWEST, block=2))
        os.kill(pids[1], signal.SIGKILL)
        while not (said := await coordinator.next()).ended:
            pass
        assert (said.ended, said.without_fault) == (((1, 7),), ())
        os.kill(pids[0], signal.SIGKILL)
        while len((said := await coordinator.next()).ended) < 2:
            pass
        assert said.without_fault == (0,)

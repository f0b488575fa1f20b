"""The herald says which ranks ended, again in each session, and passes on that all start again."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from comm_pool.layout import Rank
from coordinator.protocol import wire
from coordinator.protocol.messages.launcher import RanksEnded, RenewRanks
from worker.launch.exit_reporter import ExitPipe, ProcessStatus, _ExitReporter

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
    herald = _ExitReporter(target, TOKEN, pipe.reader, renewed.put_nowait)
    running = asyncio.create_task(herald.run())
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

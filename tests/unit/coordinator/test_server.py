"""Sessions over real gRPC: who is let in, what becomes an event, and where effects go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
import pytest

from comm_pool.layout import Rank
from coordinator.admin.app import batches_view, gateway_files_view
from coordinator.model.events import (
    Effect,
    Event,
    GatewayClosed,
    GatewayOpened,
    GatewaySent,
    RankClosed,
    RankExited,
    RankOpened,
    RankReported,
    Tick,
    ToGateway,
    ToRank,
)
from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import (
    BatchesRun,
    BatchProgress,
    Cancel,
    GatewayFiles,
    GatewayHello,
    Welcome,
)
from coordinator.protocol.messages.launcher import RanksEnded
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import Drop, PageReport, RankHello, Report
from coordinator.protocol.terms import Phase, Stage, TaskId
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.outbox import Closing, Outbox
from coordinator.server.server import CellServer, ListenError

TOKEN = "a-shared-secret-of-the-test"
PAGES = PageReport(total=8, free=8, owned=0, leased=0)
Call = Any
"""A stream-stream call; grpc's type stubs lag behind grpc."""
AIO: Any = grpc.aio


class EchoCore:
    """Remembers events; welcomes gateways and answers each report with a `Drop` that names it."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def publish(self, event: Event) -> list[Effect]:
        return []

    def decide(self, event: Event, now_ms: int) -> list[Effect]:
        if isinstance(event, Tick):
            return []
        self.heard.append(event)
        match event:
            case GatewayOpened(hello):
                return [ToGateway(hello.gateway, Welcome("c1"))]
            case RankReported(rank, report):
                return [ToRank(rank, Drop(TaskId(f"task-{report.running}"), 1))]
            case GatewaySent(_, Cancel(task)):
                return [ToRank(Rank(0), Drop(task, 1))]
        return []

    def count(self, kind: type[object]) -> int:
        return sum(isinstance(event, kind) for event in self.heard)


class Cell:
    """A server on a free port with an echoing core."""

    def __init__(self, port: int, core: EchoCore, owner: CoreActor) -> None:
        self.port = port
        self.core = core
        self.owner = owner

    @contextlib.asynccontextmanager
    async def session(
        self, path: str, hello: msgspec.Struct, token: str = TOKEN
    ) -> AsyncIterator[Call]:
        async with AIO.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            decode = wire.decode_rank_down if path == wire.RANK_PATH else wire.decode_gateway_down
            call: Call = channel.stream_stream(
                path, request_serializer=wire.encode, response_deserializer=decode
            )(metadata=((wire.TOKEN_METADATA_KEY, token),))
            await call.write(hello)
            yield call
            call.cancel()

    def rank(
        self, rank: int = 0, incarnation: int = 1, **other: Any
    ) -> "contextlib.AbstractAsyncContextManager[Call]":
        return self.session(wire.RANK_PATH, rank_hello(rank, incarnation), **other)

    def gateway(self, name: str = "g1") -> "contextlib.AbstractAsyncContextManager[Call]":
        return self.session(wire.GATEWAY_PATH, GatewayHello(PROTOCOL_VERSION, name))

    def launcher(self, *ended: tuple[int, int]) -> "contextlib.AbstractAsyncContextManager[Call]":
        told = tuple((Rank(rank), incarnation) for rank, incarnation in ended)
        return self.session(wire.LAUNCHER_PATH, RanksEnded(PROTOCOL_VERSION, told))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)


def rank_hello(rank: int, incarnation: int = 1, version: int = PROTOCOL_VERSION) -> RankHello:
    return RankHello(
        version=version,
        rank=Rank(rank),
        incarnation=incarnation,
        pid=1,
        device="cpu",
        widths=(1, 2),
        max_tasks=4,
        max_model_len_tokens=512,
        tokens_per_slot=16,
        kv_heads=4,
        pages_total=8,
        held=(),
    )


def report(rank: int = 0, steps: int = 0) -> Report:
    return Report(Rank(rank), 1, 0, Stage(0, Phase.PARK), None, None, PAGES, running=steps)


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    core = EchoCore()
    owner = CoreActor(core, tick_ms=20, clock=monotonic_ms)
    running = asyncio.create_task(owner.run())
    server = CellServer(owner, TOKEN, world=2)
    port = await server.start("127.0.0.1:0")
    yield Cell(port, core, owner)
    await server.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def refusal(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with asyncio.timeout(5):
            while await call.read() is not AIO.EOF:
                pass
    return refused.value


async def test_reports_become_events_and_effects_come_back(cell: Cell) -> None:
    async with cell.rank() as call:
        for steps in range(50):
            await call.write(report(steps=steps))
        answers = [await call.read() for _ in range(50)]
    assert answers == [Drop(TaskId(f"task-{steps}"), 1) for steps in range(50)]
    await cell.until(lambda: cell.core.count(RankClosed) == 1)
    assert cell.core.heard[0] == RankOpened(rank_hello(0))
    assert cell.core.heard[-1] == RankClosed(Rank(0), 1)


async def test_the_batches_of_a_gateway_are_kept_while_it_is_there(cell: Cell) -> None:
    one, two = (BatchProgress(f"batch_{n}", "in_progress", 9, n, 0) for n in (1, 2))
    async with cell.gateway() as gateway:
        await gateway.write(BatchesRun((one, two)))
        await cell.until(lambda: cell.owner.batches == {"g1": (one, two)})
        assert [each["batch"] for each in batches_view(cell.owner)] == ["batch_1", "batch_2"]
        await gateway.write(BatchesRun((two,)))
        await cell.until(lambda: cell.owner.batches == {"g1": (two,)})
    await cell.until(lambda: batches_view(cell.owner) == [])
    async with cell.gateway("g2") as gateway:
        assert await gateway.read() == Welcome("c1")
        assert cell.owner.batches == {}
    assert cell.core.count(GatewaySent) == 0, "the core has nothing to do with batches"


async def test_what_a_gateway_says_of_its_files_is_shown_while_it_is_there(cell: Cell) -> None:
    files = GatewayFiles("hash", keys_refusal="it is broken.")
    async with cell.gateway() as gateway:
        await gateway.write(files)
        await cell.until(lambda: cell.owner.gateway_files == {"g1": files})
        [view] = gateway_files_view(cell.owner)
        assert (view["config"], view["config_refusal"]) == ("hash", None)
        assert view["keys_refusal"] == "it is broken."
    await cell.until(lambda: gateway_files_view(cell.owner) == [])
    async with cell.gateway("g2") as gateway:
        assert await gateway.read() == Welcome("c1")
        assert cell.owner.gateway_files == {}
    assert cell.core.count(GatewaySent) == 0


async def test_gateway_is_welcomed_first_and_its_messages_reach_ranks(cell: Cell) -> None:
    async with cell.rank() as rank, cell.gateway() as gateway:
        assert await gateway.read() == Welcome("c1")
        await gateway.write(Cancel(TaskId("t")))
        assert await rank.read() == Drop(TaskId("t"), 1)
    await cell.until(lambda: cell.core.count(GatewayClosed) == 1)


@pytest.mark.parametrize("token", ["", "wrong", "ä"])
async def test_wrong_token_is_refused(cell: Cell, token: str) -> None:
    key = wire.TOKEN_METADATA_KEY
    async with AIO.insecure_channel(f"127.0.0.1:{cell.port}") as channel:
        metadata = ((key, token),) if token.isascii() else ()
        call: Call = channel.stream_stream(wire.RANK_PATH)(metadata=metadata)
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "AILERON_TOKEN" in str(error.details())
    assert cell.core.heard == []


async def test_other_version_is_refused_with_a_sentence(cell: Cell) -> None:
    hello = rank_hello(0, version=PROTOCOL_VERSION + 1)
    async with cell.session(wire.RANK_PATH, hello) as call:
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "same version of aileron" in str(error.details())
    assert cell.core.heard == []


async def test_rank_outside_the_cell_is_refused(cell: Cell) -> None:
    async with cell.rank(2) as call:
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ranks 0 to 1" in str(error.details())


@pytest.mark.parametrize("first", [report(), GatewayHello(PROTOCOL_VERSION, "g")])
async def test_session_starts_with_its_own_hello(cell: Cell, first: msgspec.Struct) -> None:
    async with cell.session(wire.RANK_PATH, first) as call:
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert cell.core.heard == []


async def test_garbage_ends_the_session(cell: Cell) -> None:
    async with AIO.insecure_channel(f"127.0.0.1:{cell.port}") as channel:
        call: Call = channel.stream_stream(wire.RANK_PATH)(
            metadata=((wire.TOKEN_METADATA_KEY, TOKEN),)
        )
        await call.write(wire.encode(rank_hello(0)))
        await call.write(b"\xc1garbage")
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    await cell.until(lambda: cell.core.count(RankClosed) == 1)


async def test_reports_of_another_rank_end_the_session(cell: Cell) -> None:
    async with cell.rank(0) as call:
        await call.write(report(rank=1))
        error = await refusal(call)
    assert "only reports of rank 0" in str(error.details())
    assert cell.core.count(RankReported) == 0


async def test_second_session_replaces_the_first(cell: Cell) -> None:
    async with cell.rank() as first:
        await cell.until(lambda: cell.core.count(RankOpened) == 1)
        async with cell.rank() as second:
            error = await refusal(first)
            assert error.code() is grpc.StatusCode.ABORTED
            await second.write(report(steps=7))
            assert await second.read() == Drop(TaskId("task-7"), 1)
            # The end of a replaced session is no end of the rank's session.
            assert cell.core.count(RankClosed) == 0
    await cell.until(lambda: cell.core.count(RankClosed) == 1)


async def test_older_process_cannot_replace_a_newer_one(cell: Cell) -> None:
    async with cell.rank(incarnation=5) as newer:
        await cell.until(lambda: cell.core.count(RankOpened) == 1)
        async with cell.rank(incarnation=4) as older:
            error = await refusal(older)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        await newer.write(report(steps=1))
        assert await newer.read() == Drop(TaskId("task-1"), 1)


async def test_a_launcher_tells_which_processes_have_ended(cell: Cell) -> None:
    async with cell.rank(0, 5), cell.rank(1, 7):
        await cell.until(lambda: cell.core.count(RankOpened) == 2)
        async with cell.launcher((0, 5), (1, 6), (9, 1)) as call:
            await cell.until(lambda: RankExited(Rank(0)) in cell.core.heard)
            ended = ((Rank(0), 5), (Rank(1), 7))
            await call.write(RanksEnded(PROTOCOL_VERSION, ended, (Rank(1),)))
            fell = RankExited(Rank(1), is_at_fault=False)
            await cell.until(lambda: fell in cell.core.heard)
    assert cell.core.count(RankExited) == 2, "once each, and not of an older process"


async def test_a_process_that_has_ended_cannot_say_hello(cell: Cell) -> None:
    async with cell.rank(1, 3), cell.launcher((0, 5), (1, 3)):
        await cell.until(lambda: cell.core.count(RankExited) == 1)
        async with cell.rank(0, 5) as call:
            error = await refusal(call)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        opened = cell.core.count(RankOpened)
        async with cell.rank(0, 6):
            await cell.until(lambda: cell.core.count(RankOpened) == opened + 1)
    assert cell.core.heard.count(RankExited(Rank(0))) == 0


async def test_sessions_that_come_and_go_fast_leave_the_last_one(cell: Cell) -> None:
    for _ in range(20):
        async with cell.rank():
            pass
    async with cell.rank() as call:
        await call.write(report(steps=3))
        assert await call.read() == Drop(TaskId("task-3"), 1)
        sessions = [each for each in cell.core.heard if isinstance(each, RankOpened | RankClosed)]
        assert isinstance(sessions[-1], RankOpened)
        assert list(cell.owner.rank_outboxes) == [0]


async def test_peer_that_does_not_read_is_cut_off() -> None:
    outbox = Outbox(messages_max=3)
    for number in range(4):
        outbox.put(Drop(TaskId(str(number)), 1))
    outbox.put(Drop(TaskId("late"), 1))
    said = await outbox.take()
    assert isinstance(said, Closing)
    assert said.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3 messages" in said.reason


async def test_what_was_said_before_the_closing_is_still_delivered() -> None:
    outbox = Outbox()
    outbox.put(Drop(TaskId("a"), 1))
    outbox.close(Closing(grpc.StatusCode.ABORTED, "x"))
    outbox.put(Drop(TaskId("b"), 1))
    assert await outbox.take() == Drop(TaskId("a"), 1)
    assert await outbox.take() == Closing(grpc.StatusCode.ABORTED, "x")


async def test_taken_address_is_named(cell: Cell) -> None:
    other = CellServer(cell.owner, TOKEN, world=2)
    with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{cell.port}"):
        await other.start(f"127.0.0.1:{cell.port}")


async def test_sessions_end_when_the_server_stops() -> None:
    owner = CoreActor(EchoCore(), tick_ms=20, clock=monotonic_ms)
    running = asyncio.create_task(owner.run())
    server = CellServer(owner, TOKEN, world=2)
    cell = Cell(await server.start("127.0.0.1:0"), EchoCore(), owner)
    async with cell.rank() as call:
        await cell.until(lambda: bool(owner.rank_outboxes))
        await server.stop()
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "the coordinator stops" in str(error.details())
    running.cancel()


async def test_a_rank_s_session_has_the_answer_before_the_rest_is_worked_out() -> None:
    class Slow(EchoCore):
        def publish(self, event: Event) -> list[Effect]:
            taken_first.append(len(taken))
            return []

    async def take() -> None:
        while True:
            taken.append(await outbox.take())

    taken: list[object] = []
    taken_first: list[int] = []
    owner = CoreActor(Slow(), tick_ms=60_000, clock=monotonic_ms)
    owner.rank_outboxes[Rank(0)] = outbox = Outbox()
    running = [asyncio.create_task(each) for each in (owner.run(), take())]
    for number in range(3):
        await owner.post(RankReported(Rank(0), report(0, number)))
    for each in running:
        each.cancel()
    assert taken == [Drop(TaskId(f"task-{number}"), 1) for number in range(3)]
    assert taken_first == [1, 2, 3]


async def test_who_waits_for_all_of_an_event_finds_its_record() -> None:
    """As one who waited for a switch and then reads metrics, in the moment after the decision."""

    class Recorder(EchoCore):
        def decide(self, event: Event, now_ms: int) -> list[Effect]:
            decided.set()
            return super().decide(event, now_ms)

        def publish(self, event: Event) -> list[Effect]:
            published.append(event)
            return []

    decided = asyncio.Event()
    published: list[Event] = []
    owner = CoreActor(Recorder(), tick_ms=60_000, clock=monotonic_ms)
    running = asyncio.create_task(owner.run())
    owner.post_soon(RankReported(Rank(0), report(0, 1)))
    await decided.wait()
    assert not published
    await owner.settled()
    assert len(published) == 1
    running.cancel()


async def test_no_event_is_handled_by_half_when_the_process_ends() -> None:
    class Watched(EchoCore):
        def publish(self, event: Event) -> list[Effect]:
            published.append(event)
            return []

        def decide(self, event: Event, now_ms: int) -> list[Effect]:
            running.cancel()
            return [ToRank(Rank(0), Drop(TaskId("a"), 1))]

    published: list[Event] = []
    owner = CoreActor(Watched(), tick_ms=60_000, clock=monotonic_ms)
    running = asyncio.create_task(owner.run())
    posted = asyncio.create_task(owner.post(Tick()))
    with contextlib.suppress(asyncio.CancelledError):
        await running
    async with asyncio.timeout(5):
        await posted
    assert published == [Tick()]


async def test_an_error_of_the_core_ends_its_owner() -> None:
    class Broken(EchoCore):
        def decide(self, event: Event, now_ms: int) -> list[Effect]:
            raise AssertionError("an invariant is broken.")

    owner = CoreActor(Broken(), tick_ms=1, clock=monotonic_ms)
    with pytest.raises(AssertionError, match="invariant"):
        async with asyncio.timeout(5):
            await owner.run()


async def test_ticks_come_by_themselves() -> None:
    class Ticked(EchoCore):
        ticks = 0

        def decide(self, event: Event, now_ms: int) -> list[Effect]:
            self.ticks += 1
            return []

    core = Ticked()
    running = asyncio.create_task(CoreActor(core, tick_ms=1, clock=monotonic_ms).run())
    async with asyncio.timeout(5):
        while core.ticks < 10:
            await asyncio.sleep(0.005)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running

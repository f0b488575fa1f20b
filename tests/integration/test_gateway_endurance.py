"""Many requests that wait, many clients that leave, and gateways that are replaced under load.

Real gateway processes, a played cell. What is measured is printed (`-s`).
"""

import asyncio
import itertools
import json
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil
import pytest

from coordinator.protocol.messages.gateway import Cancel, Submit
from tests.harness.cells import counted_gateway
from tests.harness.cells.counted_gateway import HELD_FILE
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.faults.tcp_proxy import TcpProxy
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(600)]

MIB = 1024**2
WAITING, MANY = 1_000, 10_000
AT_ONCE = 200
ROUNDS = 3
"""Crowds that come again, each a fifth of the first one."""
HELD_MIN, LEFT_MAX = 100, 10
"""Blocks of a request: it holds more while it waits, and leaves fewer when it has left.

It was measured to hold 428 and to leave 3, of the first thousands at least: the gateway remembers
the last 4,096 tasks that have ended.
"""
LEAVE_ONE_BY_ONE = 100
SEEN_S = 300
"""How long ten thousand requests may take on a machine that does other things as well."""
CLIENTS, REPLACED = 4, 1
BODY = b'{"model":"demo","prompt":[5,6,7],"max_tokens":9,"stream":true}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)

Start = Callable[[], GatewayProcess]


@pytest.fixture(scope="module")
def starts(
    own_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Start, Start]]:
    """Starts a gateway, or returns one that runs; all are ended with the module."""
    made: list[GatewayProcess] = []

    def make() -> GatewayProcess:
        folder = tmp_path_factory.mktemp("gateway")
        made.append(
            GatewayProcess(
                folder,
                MODEL_DIR,
                own_cell,
                module=counted_gateway.__name__,
                env={HELD_FILE: str(folder / "held")},
                requests_max=2 * MANY,
            )
        )
        return made[-1]

    def running() -> GatewayProcess:
        alive = [process for process in made if process.process.poll() is None]
        return alive[-1] if alive else make()

    yield make, running
    for process in made:
        process.close()


@pytest.fixture
def start(starts: tuple[Start, Start]) -> Start:
    """Starts one more gateway."""
    return starts[0]


@pytest.fixture
def gateway(starts: tuple[Start, Start]) -> GatewayProcess:
    """Whichever gateway a test before this one has left running, or a fresh one."""
    return starts[1]()


@pytest.fixture
async def cell(own_cell: FakeCell, gateway: GatewayProcess) -> AsyncIterator[FakeCell]:
    own_cell.reset()
    yield own_cell
    own_cell.reset()


@dataclass(frozen=True)
class Use:
    """What a gateway holds when it has collected its garbage."""

    tasks: int
    descriptors: int
    blocks: int
    rss_mib: int


async def use_of(gateway: GatewayProcess) -> Use:
    """Ask the process what it holds."""
    file, process = gateway.log.with_name("held"), psutil.Process(gateway.process.pid)
    file.unlink(missing_ok=True)
    gateway.signal(signal.SIGUSR2)
    deadline = time.monotonic() + SEEN_S
    while not file.exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    held = json.loads(file.read_text())
    rss_mib = process.memory_info().rss // MIB
    return Use(held["tasks"], process.num_fds(), held["blocks"], rss_mib)


async def wait_in_line(gateway: GatewayProcess, number: int) -> list[asyncio.StreamWriter]:
    """Send requests, each over its own connection."""
    writers: list[asyncio.StreamWriter] = []
    for _ in range(number // AT_ONCE):
        pairs = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(AT_ONCE))
        )
        for _, writer in pairs:
            writer.write(REQUEST)
            writers.append(writer)
    return writers


class Crowd:
    """Requests that wait in a gateway, which answers none of them."""

    def __init__(self, gateway: GatewayProcess, cell: FakeCell) -> None:
        self._gateway = gateway
        self._cell = cell
        self._writers: list[asyncio.StreamWriter] = []

    async def comes(self, number: int) -> None:
        """So many wait at once."""
        self._cell.seen.clear()
        self._writers += await wait_in_line(self._gateway, number)
        await self._cell.until(lambda: len(self._cell.of(Submit)) >= number, SEEN_S)
        assert len({each.header.task for each in self._cell.of(Submit)}) == number

    async def leaves(self, number: int) -> None:
        """All of them leave."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await self._cell.until(lambda: len(self._cell.of(Cancel)) >= number, SEEN_S)
        assert len({each.task for each in self._cell.of(Cancel)}) == number


async def settled(gateway: GatewayProcess, least: Use | None) -> Use:
    """What the process uses once it has no more tasks and descriptors than `least`.

    Without that: once they no longer fall.
    """
    deadline = time.monotonic() + SEEN_S
    last = await use_of(gateway)
    while True:
        await asyncio.sleep(0.3)
        now = await use_of(gateway)
        most = least or last
        if now.tasks <= most.tasks and now.descriptors <= most.descriptors:
            return now
        assert time.monotonic() < deadline, f"{now} of {most} at most"
        last = now


@pytest.mark.parametrize("waiting", [WAITING, pytest.param(MANY, marks=pytest.mark.long)])
async def test_a_crowd_waits_and_leaves_and_nothing_is_left(
    gateway: GatewayProcess, cell: FakeCell, waiting: int
) -> None:
    """Ten thousand take minutes beside another worker: that is a matter of `make test-long`.

    A leak adds something in every round. What Python's caches add, they add once.
    """
    crowd, again = Crowd(gateway, cell), waiting // 5
    await crowd.comes(AT_ONCE)
    await crowd.leaves(AT_ONCE)
    before = await settled(gateway, None)
    began = time.monotonic()
    await crowd.comes(waiting)
    queued_s = time.monotonic() - began
    at_most = await use_of(gateway)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=SEEN_S) as client:
        assert (await client.get("/health")).status_code == 200
    health_ms = (time.monotonic() - began) * 1e3
    began = time.monotonic()
    await crowd.leaves(waiting)
    left_s = time.monotonic() - began
    uses = [await settled(gateway, before)]
    print(f"{waiting} queued in {queued_s:.1f} s, /health meanwhile {health_ms:.0f} ms, ", end="")
    print(f"gone {left_s:.1f} s after they left; {before} before, {at_most} with them")
    for _ in range(ROUNDS):
        await crowd.comes(again)
        await crowd.leaves(again)
        uses.append(await settled(gateway, before))
    print(f"after each crowd: {uses}")
    grown = [after.blocks - earlier.blocks for earlier, after in itertools.pairwise(uses)]
    assert min(grown) < LEFT_MAX * again, "every request leaves something"
    assert at_most.descriptors >= before.descriptors + waiting
    assert at_most.blocks > before.blocks + HELD_MIN * waiting, "the blocks tell of requests"
    assert at_most.rss_mib < 2_048
    cell.behave = answer_shortly
    async with httpx.AsyncClient(base_url=gateway.url, timeout=SEEN_S) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_clients_that_leave_one_by_one_are_noticed_at_once(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    async def begin(ran: Ran) -> None:
        ran.tokens(0, [300])

    cell.behave = begin
    times_ms = []
    for number in range(1, LEAVE_ONE_BY_ONE + 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(REQUEST)
        await reader.readuntil(b"data: ")
        began = time.perf_counter()
        writer.transport.abort()
        while len(cell.of(Cancel)) < number:
            assert time.perf_counter() < began + SEEN_S
            await asyncio.sleep(0.001)
        times_ms.append((time.perf_counter() - began) * 1e3)
    p99 = statistics.quantiles(times_ms, n=100)[98]
    print(f"cancelled after median {statistics.median(times_ms):.1f}, p99 {p99:.1f} ms")
    assert statistics.median(times_ms) < 1_000


async def answer_shortly(ran: Ran) -> None:
    for index in range(5):
        ran.tokens(index, [300 + index], "length" if index == 4 else None)
        await asyncio.sleep(0.02)


class Replicas:
    """One address in front of gateways, as a Service is: it chooses among those that are ready."""

    def __init__(self, address: TcpProxy) -> None:
        self._address = address
        self._turns = itertools.count()
        self.all: list[GatewayProcess] = []

    def look(self) -> None:
        """Ask each for its readiness, and send new connections to one that is."""
        ready = [each for each in list(self.all) if _is_ready(each)]
        if ready:
            self._address.target = ready[next(self._turns) % len(ready)].port


def _is_ready(gateway: GatewayProcess) -> bool:
    try:
        return httpx.get(f"{gateway.url}/ready", timeout=SEEN_S).status_code == 200
    except httpx.TransportError:
        return False


async def test_replicas_are_replaced_one_by_one_without_an_error(
    gateway: GatewayProcess, start: Start, cell: FakeCell
) -> None:
    """The OpenAI client as it is by default, which tries a refused request again."""
    cell.behave = answer_shortly
    stopping = asyncio.Event()
    answered = 0

    async def load(client: openai.AsyncOpenAI) -> None:
        nonlocal answered
        while not stopping.is_set():
            stream = await client.completions.create(
                model="demo", prompt="x", max_tokens=5, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"
            answered += 1

    def watch(replicas: Replicas, done: "Future[Any]") -> None:
        while not done.done():
            replicas.look()
            time.sleep(0.05)

    with TcpProxy(gateway.port) as address, ThreadPoolExecutor(2) as threads:
        replicas, done = Replicas(address), Future[Any]()
        replicas.all = [gateway]
        watching = threads.submit(watch, replicas, done)
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{address.port}/v1", api_key="none"
        ) as client:
            work = [asyncio.create_task(load(client)) for _ in range(CLIENTS)]
            codes, served = [], []
            for _ in range(REPLACED):
                replicas.all.append(await asyncio.to_thread(start))
                while not await asyncio.to_thread(_is_ready, replicas.all[-1]):
                    await asyncio.sleep(0.05)
                served.append(answered)
                replicas.all[0].signal()
                codes.append(await asyncio.to_thread(replicas.all[0].wait, SEEN_S))
                del replicas.all[0]
                least = answered + 3 * CLIENTS
                while answered < least and not any(task.done() for task in work):
                    await asyncio.sleep(0.05)
            stopping.set()
            await asyncio.gather(*work)
        done.set_result(None)
        await asyncio.wrap_future(watching)
    print(f"{answered} streams over {REPLACED} replaced, no error; {served} before each")
    assert codes == [0] * REPLACED

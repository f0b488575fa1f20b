"""Many requests that wait, many clients that leave, and gateways that are replaced under load.

Real gateway processes, a played cell. What is measured is printed (`-s`).
"""

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from coordinator.protocol.messages import Cancel, Submit
from tests.harness.cells.counted_gateway import TASKS_FILE
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.faults.tcp_proxy import TcpProxy
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

MIB = 1024**2
WAITING = 10_000
AGAIN = 2_000
AT_ONCE = 200
LEAVE_ONE_BY_ONE = 200
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
    shared_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Start, Start]]:
    """Starts a gateway, or returns one that runs; all are ended with the module."""
    made: list[GatewayProcess] = []

    def make() -> GatewayProcess:
        folder = tmp_path_factory.mktemp("gateway")
        os.environ[TASKS_FILE] = str(folder / "tasks")
        made.append(
            GatewayProcess(
                folder,
                MODEL_DIR,
                shared_cell,
                module="tests.harness.cells.counted_gateway",
                requests_max=2 * WAITING,
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
async def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> AsyncIterator[FakeCell]:
    shared_cell.reset()
    yield shared_cell
    shared_cell.reset()


async def tasks_of(gateway: GatewayProcess) -> int:
    """Number of asyncio tasks in the process."""
    file = gateway.log.with_name("tasks")
    file.unlink(missing_ok=True)
    gateway.signal(signal.SIGUSR2)
    deadline = time.monotonic() + SEEN_S
    while not file.exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return int(file.read_text())


async def use_of(gateway: GatewayProcess) -> tuple[int, int, int]:
    """Tasks, descriptors and MiB of the process."""
    process = psutil.Process(gateway.process.pid)
    rss_mib = process.memory_info().rss // MIB
    return await tasks_of(gateway), process.num_fds(), rss_mib


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


async def test_ten_thousand_wait_and_leave_and_nothing_is_left(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    async def crowd(number: int) -> None:
        """So many wait at once; then all of them leave."""
        cell.seen.clear()
        writers.extend(await wait_in_line(gateway, number))
        await cell.until(lambda: len(cell.of(Submit)) >= number, SEEN_S)
        assert len({each.header.task for each in cell.of(Submit)}) == number

    async def leave(number: int) -> None:
        for writer in writers:
            writer.transport.abort()
        writers.clear()
        await cell.until(lambda: len(cell.of(Cancel)) >= number, SEEN_S)
        assert len({each.task for each in cell.of(Cancel)}) == number

    writers: list[asyncio.StreamWriter] = []
    await crowd(AT_ONCE)
    await leave(AT_ONCE)
    before = await settled(gateway, (0, 0))
    began = time.monotonic()
    await crowd(WAITING)
    queued_s = time.monotonic() - began
    at_most = await use_of(gateway)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=SEEN_S) as client:
        assert (await client.get("/health")).status_code == 200
    health_ms = (time.monotonic() - began) * 1e3
    began = time.monotonic()
    await leave(WAITING)
    left_s = time.monotonic() - began
    after = await settled(gateway, before[:2])
    print(f"{WAITING} queued in {queued_s:.1f} s, /health meanwhile {health_ms:.0f} ms, ", end="")
    print(f"gone {left_s:.1f} s after they left; tasks, descriptors, MiB: ", end="")
    print(f"{before} before, {at_most} with them, {after} after")
    await crowd(AGAIN)
    await leave(AGAIN)
    again = await settled(gateway, before[:2])
    print(f"{AGAIN} more use what was free: {again[2] - after[2]} MiB more")
    assert again[2] - after[2] < (at_most[2] - before[2]) * AGAIN / WAITING
    assert at_most[1] >= before[1] + WAITING
    assert at_most[2] < 2_048
    cell.behave = answer_shortly
    async with httpx.AsyncClient(base_url=gateway.url, timeout=SEEN_S) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def settled(gateway: GatewayProcess, least: tuple[int, int]) -> tuple[int, int, int]:
    """What the process uses once that is no more than `least`, or no longer falls if that is 0."""
    deadline = time.monotonic() + SEEN_S
    last = await use_of(gateway)
    while True:
        await asyncio.sleep(0.5)
        now = await use_of(gateway)
        if now[:2] == last[:2] if least == (0, 0) else all(map(int.__le__, now, least)):
            return now
        assert time.monotonic() < deadline, f"{now} of {least} at most"
        last = now


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

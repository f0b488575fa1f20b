"""A real gateway process and clients that are slow, idle or do not read; numbers are printed."""

import asyncio
import json
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coordinator.protocol.messages.gateway import Cancel, Done, Submit
from gateway.open_requests import UNREAD_TOKENS_MAX
from tests.harness.cells import counted_gateway
from tests.harness.cells.counted_gateway import HELD_FILE
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.cells.hasty_gateway import BODY_ENV, HASTY_S, HEADER_ENV, STALL_ENV
from tests.harness.cells.paced_leader import PacedLeader
from tests.harness.gateway.hostile_requests import CHAT
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

MIB = 1024**2
PATH = "/v1/chat/completions"
IDLE, IDLE_LONG = 1_000, 10_000
IDLE_KIB_MAX = 100
"""Memory of a connection that is idle."""
SLOW_CLIENTS = 200

SLOW_READERS = 5
CHOICES = 8
STREAM_TOKENS = 400
"""Of each choice; what is told of each are its twenty most likely tokens."""
SMALL_BYTES = 4_096
"""A reader's receive buffer, so that what it does not read waits in the gateway."""
SMALL_SEGMENT = 536
"""The kernel sizes what a socket may have on its way by segments, which on loopback are 64 KiB."""
UNREAD_PART_MAX = 0.6
"""Of the memory that the same streams take when they are read to their end. vLLM keeps the log
probabilities of each token to the end of its choice, also of what was read: a third of the tokens
waits when too many do, and with what was sent before them it is two fifths of that memory. Without
a bound it is all of it, and the memory of what waits."""
READ_MIB_MIN = 35.0
"""With less there is nothing to compare with."""
WARM_TOKENS = 8
STALLED_STEPS = 64
"""When so many tokens of each choice have come, half of those that may wait do."""
TOKEN_S = 0.01
UNREAD_TOKENS = 400
"""Fewer than may wait, and more than the kernel holds."""


def rss_mib(gateway: GatewayProcess) -> float:
    return float(psutil.Process(gateway.process.pid).memory_info().rss / MIB)


class Memory:
    """How much more a gateway took at most than when this began."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._began_mib = rss_mib(gateway)
        self.most_mib = 0.0

    def look(self) -> None:
        self.most_mib = max(self.most_mib, rss_mib(self._gateway) - self._began_mib)


async def open_idle(gateway: GatewayProcess, number: int, say: bytes) -> list[Any]:
    """Connections that have said something; a hundred are opened at a time."""

    async def open_one() -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(say)
        return reader, writer

    made: list[Any] = []
    for _ in range(number // 100):
        made += await asyncio.gather(*(open_one() for _ in range(100)))
    return made


async def p90_ms(client: httpx.AsyncClient, number: int = 200) -> float:
    """90th percentile of answer times, of requests one after another."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        assert (await client.get("/health")).status_code == 200
        times.append((time.perf_counter() - began) * 1_000)
    return statistics.quantiles(times, n=10)[-1]


async def test_slow_clients_are_cut_off_and_hold_nobody_up(hasty: GatewayProcess) -> None:
    """Half of them never end their headers, the others never end their bodies."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    length = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    async with httpx.AsyncClient(base_url=hasty.url, timeout=200) as client:
        before_ms = await p90_ms(client)
        slow = await open_idle(hasty, SLOW_CLIENTS // 2, head + b"X-Slow: ")
        slow += await open_idle(hasty, SLOW_CLIENTS // 2, head + length)
        during_ms = await p90_ms(client)
    print(f"{SLOW_CLIENTS} slow clients: p90 {before_ms:.1f} -> {during_ms:.1f} ms")
    began = time.monotonic()
    answers = await asyncio.gather(*(reader.read() for reader, _ in slow))
    took_s = time.monotonic() - began
    print(f"all cut off after another {took_s:.1f} s")
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    assert took_s < max(HASTY_S[HEADER_ENV], HASTY_S[BODY_ENV]) + 5
    for _, writer in slow:
        writer.close()
    assert during_ms < max(2 * before_ms, 50)


@pytest.mark.parametrize("number", [IDLE, pytest.param(IDLE_LONG, marks=pytest.mark.long)])
async def test_idle_connections_cost_little(
    gateway: GatewayProcess, client: httpx.AsyncClient, cell: FakeCell, number: int
) -> None:
    before_mib, process = rss_mib(gateway), psutil.Process(gateway.process.pid)
    files, before_ms = process.num_fds(), await p90_ms(client)
    say = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    idle = await open_idle(gateway, number, say)
    await asyncio.gather(*(reader.readuntil(b"}") for reader, _ in idle))
    grown_mib, health_ms = rss_mib(gateway) - before_mib, await p90_ms(client)
    assert process.num_fds() >= files + number
    print(f"{number} idle: RSS +{grown_mib:.0f} MiB, ", end="")
    print(f"/health p90 {before_ms:.1f} -> {health_ms:.1f} ms")
    assert grown_mib < number * IDLE_KIB_MAX / 1024
    assert health_ms < max(2 * before_ms, 50)
    response = await client.post(PATH, json=CHAT)
    assert response.status_code == 200
    for _, writer in idle:
        writer.transport.abort()
    for _ in range(500):
        if process.num_fds() < files + 50:
            break
        await asyncio.sleep(0.02)
    assert process.num_fds() < files + 50


def long_request(**other: Any) -> bytes:
    """A request for a stream of several MiB."""
    asked = {**CHAT, "max_tokens": STREAM_TOKENS, "stream": True, "n": CHOICES}
    body = json.dumps({**asked, "logprobs": True, "top_logprobs": 20, **other}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def readers(
    gateway: GatewayProcess, number: int, receives: int = SMALL_BYTES, **other: Any
) -> Iterator[list[socket.socket]]:
    """Connections that have asked for a long stream, by default with small receive buffers."""
    made = []
    for _ in range(number):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        if receives == SMALL_BYTES:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        one.connect(("127.0.0.1", gateway.port))
        one.sendall(long_request(**other))
        made.append(one)
    try:
        yield made
    finally:
        for one in made:
            one.close()


def is_cut_off(one: socket.socket) -> bool:
    """Read what is left; say whether it ends without the stream's end."""
    one.settimeout(20)
    tail = b""
    with suppress(ConnectionError):
        while piece := one.recv(65_536):
            tail = (tail + piece)[-64:]
    return b"[DONE]" not in tail


def read_all(one: socket.socket) -> int:
    """Read a stream to its end; returns its bytes."""
    one.settimeout(200)
    read, tail = 0, b""
    while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        piece = one.recv(65_536)
        assert piece, "the stream broke off"
        read, tail = read + len(piece), (tail + piece)[-64:]
    return read


async def median_ms(client: httpx.AsyncClient) -> float:
    """How long a short answer takes, in the median of some."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        assert (await client.get("/v1/models")).status_code == 200
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


@pytest.fixture
def fresh(own_cell: FakeCell, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway for one test: what one has freed after others hides what it takes now.

    What was free when it was forked it gives back first.
    """
    held = tmp_path / "held"
    process = GatewayProcess(
        tmp_path,
        MODEL_DIR,
        own_cell,
        module=counted_gateway.__name__,
        env={HELD_FILE: str(held)},
    )
    process.signal(signal.SIGUSR2)
    while not held.exists():
        time.sleep(0.01)
    own_cell.reset()
    yield process
    process.close()


@pytest.fixture
async def beside(fresh: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the fresh gateway."""
    async with httpx.AsyncClient(base_url=fresh.url, timeout=200) as made:
        yield made


async def until_stepped(leader: PacedLeader) -> None:
    """Wait until every client that does not read has stopped reading."""
    began = leader.steps
    await leader.cell.until(lambda: leader.steps >= began + STALLED_STEPS, 60)


async def until_ended(cell: FakeCell, leader: PacedLeader, tasks: int) -> tuple[int, int]:
    """Wait for the end of so many tasks; returns how many came to it, and how many were cancelled.

    Forgets what the cell has seen.
    """

    def ends() -> tuple[int, int]:
        submitted = {submit.header.task for submit in cell.of(Submit)}
        done = {message.task for message in cell.of(Done)}
        return len(submitted & done), len(submitted & {one.task for one in cell.of(Cancel)})

    await cell.until(lambda: leader.is_idle and sum(ends()) == tasks, 150)
    found = ends()
    cell.seen.clear()
    return found


@pytest.mark.timeout(480)
async def test_who_does_not_read_is_given_up_when_too_much_waits(
    fresh: GatewayProcess, beside: httpx.AsyncClient, own_cell: FakeCell
) -> None:
    """Who reads the same streams gets them whole, which is also the memory to compare with."""
    assert CHOICES * STREAM_TOKENS > 2 * UNREAD_TOKENS_MAX, "they cannot wait to the end"
    tasks, cell = SLOW_READERS * CHOICES, own_cell
    leader = PacedLeader(cell, TOKEN_S, logprobs=20)
    cell.behave = leader.serve
    with readers(fresh, 1, receives=4 * MIB, max_tokens=WARM_TOKENS) as (first,):
        await asyncio.to_thread(read_all, first)
        assert await until_ended(cell, leader, CHOICES) == (CHOICES, 0)
    memory = Memory(fresh)
    leader.behind_step = memory.look
    with readers(fresh, SLOW_READERS) as unread:
        await until_stepped(leader)
        unread_ms = await median_ms(beside)
        ends, unread_mib = await until_ended(cell, leader, tasks), memory.most_mib
        are_given_up = ends == (0, tasks) and all(
            await asyncio.gather(*(asyncio.to_thread(is_cut_off, one) for one in unread))
        )
    with readers(fresh, SLOW_READERS, receives=4 * MIB) as reading:
        work = asyncio.gather(*(asyncio.to_thread(read_all, one) for one in reading))
        await until_stepped(leader)
        read_ms, read = await median_ms(beside), await work
        assert await until_ended(cell, leader, tasks) == (tasks, 0)
    read_mib = memory.most_mib
    print(f"{SLOW_READERS} readers of {sum(read) / MIB:.0f} MiB that do not read: ", end="")
    print(f"RSS +{unread_mib:.1f} MiB, +{read_mib:.1f} MiB if they do; ", end="")
    print(f"answers beside them {unread_ms:.0f} ms, beside clients that read {read_ms:.0f} ms")
    assert read_mib > READ_MIB_MIN
    assert unread_mib < UNREAD_PART_MAX * read_mib
    assert are_given_up, f"{ends[0]} came to their end, {ends[1]} were cancelled"
    assert unread_ms < 1.5 * read_ms + 50


async def test_who_stands_still_is_given_up_after_the_stall_limit(
    hasty: GatewayProcess, hasty_cell: FakeCell
) -> None:
    """Although no more waits than may: the stream says nothing more, and has no end yet."""

    async def stop_talking(ran: Ran) -> None:
        for index in range(UNREAD_TOKENS):
            ran.tokens(index, [300 + index], logprobs=20)

    hasty_cell.reset()
    hasty_cell.behave = stop_talking
    stall_s = HASTY_S[STALL_ENV]
    assert UNREAD_TOKENS < UNREAD_TOKENS_MAX
    with readers(hasty, 1, n=1) as (unread,):
        await hasty_cell.until(lambda: hasty_cell.of(Submit), 30)
        began = time.monotonic()
        await hasty_cell.until(lambda: hasty_cell.of(Cancel), stall_s + 10)
        took_s = time.monotonic() - began
        assert await asyncio.to_thread(is_cut_off, unread)
    print(f"given up after {took_s:.1f} s, with a limit of {stall_s} s")
    assert stall_s - 0.5 <= took_s < stall_s + 5

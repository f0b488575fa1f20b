"""A real gateway process and clients that are slow, idle or do not read; numbers are printed."""

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coordinator.protocol.messages import Cancel, Done, Submit
from gateway.connection import HEADER_WAIT_S
from gateway.tasks import UNREAD_TOKENS_MAX
from tests.harness import hasty_gateway
from tests.harness.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.integration.hostile_requests import CHAT
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

MIB = 1024**2
PATH = "/v1/chat/completions"
IDLE_CONNECTIONS = 10_000
SLOW_CLIENTS = 1_000

SLOW_READERS = 8
CHOICES = 8
STREAM_TOKENS = 400
"""Of each choice; what is told of each are its twenty most likely tokens."""
SMALL_BYTES = 4_096
"""A reader's receive buffer, so that what it does not read waits in the gateway."""
SMALL_SEGMENT = 536
"""The kernel sizes what a socket may have on its way by segments, which on loopback are 64 KiB."""
UNREAD_MIB_MAX = 12.0
"""Without a bound it was 48 MiB; what they would have read has 30 MiB."""
TOKEN_S = 0.02
STALL_S = 3.0


async def answer_at_length(ran: Ran) -> None:
    """Every token with the twenty most likely ones: more than a KiB of stream each."""
    for index in range(STREAM_TOKENS):
        end = "length" if index == STREAM_TOKENS - 1 else None
        ran.tokens(index, [300 + index], end, logprobs=20)
        await asyncio.sleep(TOKEN_S)


def rss_mib(gateway: GatewayProcess) -> float:
    return float(psutil.Process(gateway.process.pid).memory_info().rss / MIB)


async def open_idle(gateway: GatewayProcess, number: int, say: bytes) -> list[Any]:
    """Connections that have said something; a hundred are opened at a time."""
    made: list[Any] = []
    for _ in range(number // 100):
        some = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(100))
        )
        for _, writer in some:
            writer.write(say)
        made += some
    return made


async def p99_ms(client: httpx.AsyncClient, number: int = 200) -> float:
    """99th percentile of answer times, of requests one after another."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        assert (await client.get("/health")).status_code == 200
        times.append((time.perf_counter() - began) * 1_000)
    return statistics.quantiles(times, n=100)[98]


@pytest.mark.timing
async def test_slow_clients_are_cut_off_and_hold_nobody_up(
    gateway: GatewayProcess, client: httpx.AsyncClient, cell: FakeCell
) -> None:
    before_ms = await p99_ms(client)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    length = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    slow = await open_idle(gateway, SLOW_CLIENTS // 2, head + b"X-Slow: ")
    slow += await open_idle(gateway, SLOW_CLIENTS // 2, head + length)
    during_ms = await p99_ms(client)
    print(f"{SLOW_CLIENTS} slow clients: p99 {before_ms:.1f} -> {during_ms:.1f} ms")
    began = time.monotonic()
    answers = await asyncio.gather(*(reader.read() for reader, _ in slow))
    took_s = time.monotonic() - began
    print(f"all cut off after another {took_s:.1f} s")
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    assert took_s < HEADER_WAIT_S + 5
    for _, writer in slow:
        writer.close()
    assert during_ms < max(2 * before_ms, 50)


@pytest.mark.timing
async def test_ten_thousand_idle_connections(
    gateway: GatewayProcess, client: httpx.AsyncClient, cell: FakeCell
) -> None:
    before_mib, process = rss_mib(gateway), psutil.Process(gateway.process.pid)
    files = process.num_fds()
    say = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    idle = await open_idle(gateway, IDLE_CONNECTIONS, say)
    await asyncio.gather(*(reader.readuntil(b"}") for reader, _ in idle))
    grown_mib, health_ms = rss_mib(gateway) - before_mib, await p99_ms(client)
    assert process.num_fds() >= files + IDLE_CONNECTIONS
    print(f"{IDLE_CONNECTIONS} idle: RSS +{grown_mib:.0f} MiB, /health p99 {health_ms:.1f} ms")
    assert grown_mib < 1_024
    assert health_ms < 250
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


@pytest.mark.timing
async def test_who_does_not_read_is_given_up_when_too_much_waits(
    gateway: GatewayProcess, client: httpx.AsyncClient, cell: FakeCell
) -> None:
    """Who reads the same streams gets them whole, which is also the memory to compare with."""
    cell.behave = answer_at_length
    tasks = SLOW_READERS * CHOICES
    assert CHOICES * STREAM_TOKENS > 2 * UNREAD_TOKENS_MAX, "they cannot wait to the end"
    with readers(gateway, SLOW_READERS, receives=4 * MIB) as reading:
        work = asyncio.gather(*(asyncio.to_thread(read_all, one) for one in reading))
        await cell.until(lambda: len(cell.of(Submit)) == tasks, 30)
        read_ms, read = await median_ms(client), await work
    await cell.until(lambda: len(cell.of(Done)) == tasks, 30)
    assert cell.of(Cancel) == []
    cell.seen.clear()
    before_mib = rss_mib(gateway)
    with readers(gateway, SLOW_READERS) as unread:
        await cell.until(lambda: len(cell.of(Submit)) == tasks, 30)
        unread_ms = await median_ms(client)
        await cell.until(lambda: len(cell.of(Cancel)) == tasks, 30)
        grown_mib = rss_mib(gateway) - before_mib
        assert all(await asyncio.gather(*(asyncio.to_thread(is_cut_off, one) for one in unread)))
    print(f"{SLOW_READERS} readers of {sum(read) / MIB:.0f} MiB that do not read: ", end="")
    print(f"RSS +{grown_mib:.1f} MiB; answers beside them {unread_ms:.0f} ms, ", end="")
    print(f"beside clients that read {read_ms:.0f} ms")
    assert cell.of(Done) == [], "none of them came to its end"
    assert grown_mib < UNREAD_MIB_MAX
    assert unread_ms < 1.5 * read_ms + 50


@pytest.mark.timing
async def test_who_stands_still_is_given_up_after_the_stall_limit(
    shared_cell: FakeCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although no more waits than may: the stream says nothing more, and has no end yet."""

    async def stop_talking(ran: Ran) -> None:
        for index in range(STREAM_TOKENS):
            ran.tokens(index, [300 + index], logprobs=20)

    monkeypatch.setenv(hasty_gateway.STALL_ENV, str(STALL_S))
    gateway = GatewayProcess(tmp_path, MODEL_DIR, shared_cell, module=hasty_gateway.__name__)
    shared_cell.reset()
    shared_cell.behave = stop_talking
    assert STREAM_TOKENS < UNREAD_TOKENS_MAX
    try:
        with readers(gateway, 1, n=1) as (unread,):
            await shared_cell.until(lambda: shared_cell.of(Submit), 30)
            began = time.monotonic()
            await shared_cell.until(lambda: shared_cell.of(Cancel), STALL_S + 10)
            took_s = time.monotonic() - began
            assert await asyncio.to_thread(is_cut_off, unread)
    finally:
        gateway.close()
    print(f"given up after {took_s:.1f} s, with a limit of {STALL_S} s")
    assert STALL_S - 0.5 <= took_s < STALL_S + 5

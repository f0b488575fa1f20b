"""Several gateway processes on one port: they share the load, and one that dies is replaced."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coordinator.protocol.messages.gateway import GatewayHello, Submit
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240)]

PROCESSES = 3
CONNECTIONS = 48
REPLACED_WITHIN_S = 30
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "say it"}],
    "stream": True,
}


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture
def gateway(cell: FakeCell, tmp_path: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path, MODEL_DIR, cell, processes=PROCESSES)
    yield process
    process.close()


def siblings(gateway: GatewayProcess) -> set[int]:
    return {child.pid for child in psutil.Process(gateway.process.pid).children()}


async def answer(ran: Ran) -> None:
    """Two tokens at once."""
    ran.tokens(0, [600, 601], "length")


async def asked(gateway: GatewayProcess) -> list[httpx.Response]:
    """One request on each of many connections, all at once."""

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
            return await client.post("/v1/chat/completions", json=CHAT)

    return await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))


async def test_they_share_the_load_and_a_dead_one_is_replaced(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    cell.behave = answer
    first = siblings(gateway)
    assert len(first) == PROCESSES
    await cell.until(lambda: len(cell.of(GatewayHello)) >= PROCESSES)
    for response in await asked(gateway):
        assert "[DONE]" in response.text
    used = {submit.header.reply_to for submit in cell.of(Submit)}
    assert len(used) == PROCESSES, "the kernel spreads connections over all"

    hellos = len(cell.of(GatewayHello))
    victim = min(first)
    os.kill(victim, signal.SIGKILL)
    await cell.until(lambda: len(cell.of(GatewayHello)) > hellos, REPLACED_WITHIN_S)
    second = siblings(gateway)
    assert len(second) == PROCESSES
    assert second - first
    assert victim not in second
    assert gateway.process.poll() is None
    for response in await asked(gateway):
        assert "[DONE]" in response.text

    gateway.signal(signal.SIGTERM)
    assert gateway.wait(20) == 0
    assert not [pid for pid in second if psutil.pid_exists(pid)]


async def test_a_stream_of_another_process_does_not_notice(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    running: dict[str, Ran] = {}

    async def begin(ran: Ran) -> None:
        ran.tokens(0, [600])
        running[ran.submit.header.reply_to] = ran

    cell.behave = begin
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        work = [
            asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(24)
        ]
        await cell.until(lambda: len(cell.of(Submit)) == len(work), 20)
        victim = min(siblings(gateway))
        os.kill(victim, signal.SIGKILL)
        await cell.until(lambda: any(task.done() for task in work), 20)
        gateway.signal(signal.SIGTERM)  # They drain: what still runs may finish.
        for ran in cell.of(Submit):
            cell.on_leader(partial(cell.ran(ran).tokens, 1, [601], "length"))
        ends = await asyncio.gather(*work, return_exceptions=True)
    whole = [end for end in ends if isinstance(end, httpx.Response)]
    assert all("[DONE]" in response.text for response in whole)
    broken = [end for end in ends if not isinstance(end, httpx.Response)]
    assert all(isinstance(end, httpx.TransportError) for end in broken), broken
    assert 0 < len(broken) < len(work)
    assert gateway.wait(20) == 0


async def test_a_repeated_request_gets_its_answer_from_whichever_process_it_reaches(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    cell.behave = answer
    body, headers = {**CHAT, "stream": False}, {"Idempotency-Key": "once"}
    answers = []
    for _ in range(CONNECTIONS):
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
            answers.append(await client.post("/v1/chat/completions", json=body, headers=headers))
    assert {(each.status_code, each.content) for each in answers} == {(200, answers[0].content)}
    assert len(cell.of(Submit)) == 1
    repeated = [each.headers.get("idempotent-replayed") for each in answers]
    assert repeated == [None, *["true"] * (CONNECTIONS - 1)]

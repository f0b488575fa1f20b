"""What a real gateway process counts of its requests, as the coordinator gets it."""

import asyncio
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from coordinator.protocol.messages.gateway import Cancel, Submit
from coordinator.protocol.metrics_wire import Measures
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": "say it"}]},
    TEXT: {"model": "demo", "prompt": "say it", "max_tokens": 16},
    RESPONSES: {"model": "demo", "input": "say it"},
}
ENDS = "vllm:request_success"


def ends(cell: FakeCell) -> dict[str, float]:
    """vLLM's ended requests by reason, in the newest message that has them."""
    for message in reversed(cell.of(Measures)):  # type: ignore[type-var]
        for family in message.families:
            if family.name == ENDS:
                return {each.labels[0]: each.value for each in family.series}
    return {}


def growth(cell: FakeCell, before: dict[str, float]) -> dict[str, float]:
    now = ends(cell)
    grown = {reason: now[reason] - before.get(reason, 0) for reason in now}
    return {reason: value for reason, value in grown.items() if value}


async def settled(
    client: httpx.AsyncClient, cell: FakeCell, before: dict[str, float], lengths: int = 1
) -> dict[str, float]:
    """The growth once one more request, which ends at its limit, is counted.

    `lengths`: requests that end at their limit, that one among them.
    """

    async def answer(ran: Ran) -> None:
        ran.tokens(0, [300, 301], "length")

    cell.behave = answer
    assert (await client.post(TEXT, json=BODIES[TEXT])).status_code == 200
    await cell.until(lambda: growth(cell, before).get("length") == lengths)
    return growth(cell, before)


async def known(client: httpx.AsyncClient, cell: FakeCell) -> dict[str, float]:
    """What is counted when a test begins, with all that earlier tests did."""
    before = await cell.until(lambda: ends(cell))
    await settled(client, cell, before)
    return ends(cell)


async def say_little(ran: Ran) -> None:
    ran.tokens(0, [300])


async def leave(gateway: GatewayProcess, cell: FakeCell, path: str, body: dict[str, Any]) -> None:
    """Leave in the middle of an answer, whole or streamed, when all its tasks have a token."""
    cell.seen.clear()
    cell.behave = say_little
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        ask = asyncio.create_task(post(client, path, body))
        choices = body.get("n", 1)
        await cell.until(lambda: len(cell.of(Submit)) == choices)
        await asyncio.sleep(0.2)
        ask.cancel()
    await cell.until(lambda: len(cell.of(Cancel)) == choices)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with client.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("path", "choices"), [(CHAT, 1), (CHAT, 2), (TEXT, 1), (TEXT, 2), (RESPONSES, 1)]
)
async def test_a_client_that_leaves_is_counted_once_for_each_choice(
    client: httpx.AsyncClient,
    gateway: GatewayProcess,
    cell: FakeCell,
    path: str,
    choices: int,
    stream: bool,
) -> None:
    before = await known(client, cell)
    body = {**BODIES[path], "stream": stream}
    if choices > 1:
        body["n"] = choices
    await leave(gateway, cell, path, body)
    assert await settled(client, cell, before) == {"abort": choices, "length": 1}


async def test_only_the_choices_that_still_run_are_aborted(
    client: httpx.AsyncClient, gateway: GatewayProcess, cell: FakeCell
) -> None:
    before = await known(client, cell)

    async def behave(ran: Ran) -> None:
        if ran.id.startswith("0_"):
            ran.tokens(0, [300, 301], "length")
        else:
            ran.tokens(0, [300])

    cell.seen.clear()
    cell.behave = behave
    body = {**BODIES[CHAT], "n": 2, "stream": True}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as leaving:
        ask = asyncio.create_task(post(leaving, CHAT, body))
        await cell.until(lambda: len(cell.of(Submit)) == 2)
        await asyncio.sleep(0.2)
        ask.cancel()
    await cell.until(lambda: cell.of(Cancel))
    assert await settled(client, cell, before, lengths=2) == {"abort": 1, "length": 2}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_stop_string_is_no_abort(
    client: httpx.AsyncClient, cell: FakeCell, stream: bool, choices: int
) -> None:
    """AsyncLLM cancels the rest of such a task as it cancels an aborted one."""
    before = await known(client, cell)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = tokenizer.encode("one small step for a man", add_special_tokens=False).ids
    cell.seen.clear()

    async def behave(ran: Ran) -> None:
        ran.tokens(0, ids)

    cell.behave = behave
    body = {**BODIES[TEXT], "stop": ["step"], "n": choices, "stream": stream}
    answer = await client.post(TEXT, json=body)
    assert '"finish_reason":"stop"' in answer.text
    await cell.until(lambda: len(cell.of(Cancel)) == choices)
    assert await settled(client, cell, before) == {"stop": choices, "length": 1}


async def test_a_refused_request_is_no_abort(client: httpx.AsyncClient, cell: FakeCell) -> None:
    before = await known(client, cell)
    answer = await client.post(CHAT, json={**BODIES[CHAT], "temperature": 9})
    assert answer.status_code == 400
    assert await settled(client, cell, before) == {"length": 1}

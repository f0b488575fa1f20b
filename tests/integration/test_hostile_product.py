"""Hostile requests to the whole product: whatever passes the gateway must not hurt a rank."""

import asyncio
import json
from collections import Counter

import httpx
import openai
import psutil
import pytest

from tests.harness.cells.product import MODEL_NAME, Product
from tests.harness.gateway.hostile_requests import (
    BODIES,
    CANARY,
    CHAT,
    OUTCOMES,
    PARAMETERS,
    PROMPTS,
)

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-product")]

STREAMS = 4
TOKENS = 64
AT_ONCE = 4
ANSWER_LIMIT_S = 60.0
Request = tuple[str, str, bytes]
"""Its name, path and body."""


@pytest.fixture(scope="module")
def running(shared_product: Product) -> Product:
    """The product that modules share."""
    return shared_product


def corpus(everything: bool) -> list[Request]:
    """Each request once whole and, where that is not what is wrong, once as a stream.

    Without `everything`, only what passes the gateway, and prompts: of what it refuses
    `test_gateway_hostile` shows that no cell gets it.
    """
    chat = {**CHAT, "model": MODEL_NAME}
    found: list[Request] = [
        (name, "/v1/chat/completions", body.replace(b'"demo', b'"' + MODEL_NAME.encode()))
        for name, body in BODIES.items()
        if everything
    ]
    asked = [
        (name, "/v1/chat/completions", {**chat, **over})
        for name, over in PARAMETERS.items()
        if everything or OUTCOMES[name][0] == 200
    ] + [
        (name, "/v1/completions", {"model": MODEL_NAME, "max_tokens": 2, **over})
        for name, over in PROMPTS.items()
    ]
    for name, path, body in asked:
        ways = [body] if "stream" in body else [body, {**body, "stream": True}]
        found += [(name, path, json.dumps(way).encode()) for way in ways]
    return found


async def stream(client: openai.AsyncOpenAI, number: int) -> list[int]:
    """The tokens of one greedy stream."""
    tokens: list[int] = []
    chunks = await client.completions.create(
        model=MODEL_NAME,
        prompt=f"# {number}\nimport os, sys\n\ndef main(",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            tokens += getattr(choice, "token_ids", None) or []
    return tokens


async def streams_until(client: openai.AsyncOpenAI, over: asyncio.Event) -> list[list[list[int]]]:
    """Rounds of streams, each of them begun before the event, and at least one."""
    rounds: list[list[list[int]]] = []
    while not rounds or not over.is_set():
        rounds.append(await asyncio.gather(*(stream(client, each) for each in range(STREAMS))))
    return rounds


async def send_all(url: str, requests: list[Request]) -> Counter[int]:
    """Send requests, a few at once; returns how often each status came."""
    statuses: Counter[int] = Counter()
    waiting = iter(requests)

    async def send_some(client: httpx.AsyncClient) -> None:
        for name, path, body in waiting:
            answer = await client.post(path, content=body, headers={"x-request-id": "hostile"})
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (name, answer.text)
            if answer.status_code >= 400:
                assert CANARY not in answer.text, name
            elif "event-stream" in answer.headers["content-type"]:
                assert '"error"' in answer.text or answer.text.endswith("[DONE]\n\n"), name
                assert "internal_error" not in answer.text, (name, answer.text)

    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_LIMIT_S) as client:
        await asyncio.gather(*(send_some(client) for _ in range(AT_ONCE)))
    return statuses


def processes(running: Product) -> tuple[set[int], list[int]]:
    """Every process of the product that serves, and the ranks' as the coordinator knows them.

    Those that check grammars are ended by hostile ones, and that is what they are for.
    """
    servers = {running.process.pid, *map(running.child, ("gateway", "coordinator", "worker"))}
    ranks = [each["pid"] for each in running.get("/admin/ranks")["ranks"]]
    return servers | set(ranks), ranks


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_streams_beside_hostile_requests_are_what_they_are_alone(
    running: Product, layout: str, everything: bool
) -> None:
    """The whole corpus takes minutes."""
    await asyncio.to_thread(running.switch, layout, "recompute")
    before, ranks = processes(running)
    over = asyncio.Event()
    async with openai.AsyncOpenAI(
        base_url=running.url + "/v1", api_key="none", max_retries=0
    ) as client:
        alone = [await stream(client, number) for number in range(STREAMS)]
        assert [len(each) for each in alone] == [TOKENS] * STREAMS
        beside = asyncio.create_task(streams_until(client, over))
        try:
            statuses = await send_all(running.url, corpus(everything))
        finally:
            over.set()
            rounds = await beside
    print(f"{layout}: {dict(statuses)} beside {len(rounds)} rounds of {STREAMS} streams")
    assert statuses[200], "some of them reach the ranks"
    assert all(each == alone for each in rounds)
    assert processes(running) == (before, ranks)
    assert all(psutil.pid_exists(pid) for pid in before)
    assert running.get("/admin/layout")["serving"]

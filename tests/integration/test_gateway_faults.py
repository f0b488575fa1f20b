"""A real gateway process while its cell fails, moves tasks, repeats itself and goes away."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    Done,
    Resubmit,
    StreamGap,
    Submit,
    TaskFailed,
)
from coordinator.protocol.terms import Tier
from gateway.admission.permits import REFUSAL_HOLDS_S, REFUSED_CODE
from gateway.http.answer import KEEP_ALIVE
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran, text_of
from tests.harness.cells.hasty_gateway import HASTY_S, KEEP_ALIVE_ENV
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

WORDS = "one small step for a man is one giant leap for all of us"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "say it"}]}
PATH = "/v1/chat/completions"
REFUSALS = 25
REFUSED_PART_MAX = 2.0
"""Of the time that an answer of one token takes: a refusal needs no more than that."""
SILENT_S = 1.7 * HASTY_S[KEEP_ALIVE_ENV]


@pytest.fixture
async def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> FakeCell:
    await shared_cell.until(lambda: ready(gateway).status_code == 200)
    shared_cell.reset()
    return shared_cell


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@pytest.fixture(scope="module")
def ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    return list(tokenizer.encode(WORDS, add_special_tokens=False).ids)


def ready(gateway: GatewayProcess) -> httpx.Response:
    return httpx.get(f"{gateway.url}/ready")


FAILURES = [
    ("queue_full", openai.RateLimitError, 429),
    ("context_length_exceeded", openai.BadRequestError, 400),
    ("no_healthy_workers", openai.InternalServerError, 503),
    ("deadline_exceeded", openai.InternalServerError, 504),
    ("EngineDeadError", openai.InternalServerError, 500),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "error", "status"), FAILURES)
async def test_failure_before_the_first_token_is_an_http_error(
    client: openai.AsyncOpenAI,
    cell: FakeCell,
    stream: bool,
    code: str,
    error: type[openai.APIStatusError],
    status: int,
) -> None:
    async def refuse(ran: Ran) -> None:
        cell.say(TaskFailed(ran.id, code, "There is a reason."))

    cell.behave = refuse
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == (code if code.islower() else "internal_error")
    assert "There is a reason." in caught.value.message
    assert "vllm" not in caught.value.response.text.lower()
    if code == REFUSED_CODE:
        await asyncio.sleep(2 * REFUSAL_HOLDS_S)


async def test_a_refusal_of_a_full_queue_comes_as_soon_as_an_answer(
    gateway: GatewayProcess, cell: FakeCell, ids: list[int]
) -> None:
    """The first one of a tenant is the coordinator's, the second the gateway's own memory of it."""

    async def refuse(ran: Ran) -> None:
        if ran.submit.header.tier is Tier.BATCH:
            cell.say(TaskFailed(ran.id, REFUSED_CODE, "Full."))
        else:
            ran.tokens(0, ids[:1], "length")

    cell.behave = refuse
    took_ms: dict[str, list[float]] = {"asked": [], "remembered": [], "answered": []}
    async with aiohttp.ClientSession(gateway.url) as client:
        for number in range(REFUSALS):
            for name, times in took_ms.items():
                tier = "standard" if name == "answered" else "batch"
                headers = {"X-Priority-Tier": tier, "X-Gateway-Inference-Fairness-Id": f"t{number}"}
                began = time.perf_counter()
                async with client.post(PATH, json=CHAT, headers=headers) as response:
                    answer = await response.json()
                times.append((time.perf_counter() - began) * 1e3)
                if name == "answered":
                    assert response.status == 200
                    continue
                assert (response.status, answer["error"]["code"]) == (429, REFUSED_CODE)
                assert 1 <= int(response.headers["retry-after"]) <= 60
    # It is remembered for a tenth of a second, in which a busy machine may not ask again.
    assert len(cell.of(Submit)) < 2.5 * REFUSALS, "what is remembered is not asked again"
    median_ms = {name: statistics.median(times) for name, times in took_ms.items()}
    print({name: f"{each:.1f} ms" for name, each in median_ms.items()})
    for name in ("asked", "remembered"):
        assert median_ms[name] < REFUSED_PART_MAX * median_ms["answered"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_failure_after_the_first_token_ends_the_stream_with_an_error(
    gateway: GatewayProcess, cell: FakeCell, ids: list[int], path: str
) -> None:
    async def break_off(ran: Ran) -> None:
        ran.tokens(0, ids[:3])
        await asyncio.sleep(0.1)
        cell.say(TaskFailed(ran.id, "no_healthy_workers", "All ranks are lost."))

    cell.behave = break_off
    body = {**CHAT, "prompt": "x", "stream": True}
    if path == "/v1/completions":
        del body["messages"]
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200
    events = [line for line in response.text.split("\n\n") if line]
    assert events[-1].startswith('data: {"error":{"message":"All ranks are lost."')
    assert '"code":"no_healthy_workers"' in events[-1]
    assert "[DONE]" not in response.text
    assert '"finish_reason":"error"' not in response.text


async def test_client_library_raises_for_a_failure_in_the_stream(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    async def break_off(ran: Ran) -> None:
        ran.tokens(0, ids[:3])
        await asyncio.sleep(0.1)
        cell.say(TaskFailed(ran.id, "no_healthy_workers", "All ranks are lost."))

    cell.behave = break_off
    answer = await client.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIError) as caught:
        await text_of(answer)
    assert caught.value.code == "no_healthy_workers"


async def test_leader_that_ends_a_task_with_an_error_is_a_500(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    async def fail(ran: Ran) -> None:
        from vllm.v1.engine import FinishReason

        span, output = ran.part(0, ids[:1], "stop")
        output.finish_reason = FinishReason.ERROR
        ran.push([(span, output)])

    cell.behave = fail
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(**CHAT)
    assert caught.value.code == "internal_error"


async def test_one_failed_choice_fails_the_request_at_once(
    client: openai.AsyncOpenAI, cell: FakeCell
) -> None:
    async def fail_first(ran: Ran) -> None:
        if ran.id.startswith("0_"):
            cell.say(TaskFailed(ran.id, "queue_full", "Full."))

    cell.behave = fail_first
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(**CHAT, n=3)
    await cell.until(lambda: len({each.task for each in cell.of(Cancel)}) == 3)
    await asyncio.sleep(2 * REFUSAL_HOLDS_S)


async def test_repeated_and_reordered_pushes_change_nothing(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    """Twenty streams at once, each cut differently, everything shuffled and sent up to twice."""
    rng = random.Random(7)
    number = 20

    async def messy(ran: Ran) -> None:
        parts = []
        first = 0
        while first < len(ids):
            last = min(len(ids), first + rng.randint(1, 4))
            end = "length" if last == len(ids) else None
            parts.append((max(0, first - rng.randint(0, 2)), last, end))
            first = last
        window = sorted([*parts, *rng.choices(parts, k=4)], key=lambda p: p[0] + 6 * rng.random())
        for first, last, end in window:
            ran.tokens(first, ids[first:last], end, logprobs=1)
            await asyncio.sleep(0.001)

    cell.behave = messy
    prompts = ["x"] * number
    answer = await client.completions.create(
        model="demo", prompt=prompts, logprobs=1, max_tokens=len(ids)
    )
    assert [choice.text for choice in answer.choices] == [WORDS] * number
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(
            [-(index + 1) / 100 for index in range(len(ids))]
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == number * len(ids)
    await cell.until(lambda: len(cell.of(Done)) == number)


async def test_task_that_moves_goes_on_where_it_was(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    """Another leader takes over with a new attempt and a new epoch, and repeats a little."""

    async def move(ran: Ran) -> None:
        ran.tokens(0, ids[:4], epoch=1)
        await asyncio.sleep(0.2)
        ran.tokens(3, ids[3:6], attempt=2, epoch=2)
        ran.tokens(4, [9, 9, 9], attempt=1, epoch=1)
        ran.tokens(6, ids[6:], "length", attempt=2, epoch=2)

    cell.behave = move
    answer = await client.chat.completions.create(**CHAT, stream=True)
    assert await text_of(answer) == WORDS
    gaps = await cell.until(lambda: cell.of(StreamGap))
    assert gaps[-1].epoch == 2
    assert 150 < gaps[-1].gap_ms < 2_000


async def test_resubmitted_task_goes_on_behind_what_the_client_has(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    async def lose_the_rank(ran: Ran) -> None:
        if not ran.submit.delivered_tokens:
            ran.tokens(0, ids[:4])
            await asyncio.sleep(0.2)
            cell.say(Resubmit(ran.id, 2))
            return
        got = len(ran.submit.delivered_tokens)
        assert ran.submit.attempt == 2
        ran.tokens(got, [9], attempt=1)
        ran.tokens(got, ids[got:], "length", attempt=3)

    cell.behave = lose_the_rank
    answer = await client.chat.completions.create(**CHAT, stream=True)
    assert await text_of(answer) == WORDS
    assert [list(each.delivered_tokens) for each in cell.of(Submit)] == [[], ids[:4]]


async def test_streams_survive_the_coordinator(
    gateway: GatewayProcess, client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    running: list[Ran] = []

    async def start(ran: Ran) -> None:
        if not running:
            running.append(ran)
            ran.tokens(0, ids[:2])

    cell.behave = start
    stream = asyncio.create_task(text_of(await client.chat.completions.create(**CHAT, stream=True)))
    await cell.until(lambda: running)
    cell.go_away()
    await cell.until(lambda: ready(gateway).status_code == 503)
    assert ready(gateway).json()["error"]["code"] == "no_healthy_workers"
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    cell.on_leader(lambda: running[0].tokens(2, ids[2:5]))
    await asyncio.sleep(0.1)
    cell.seen.clear()
    late = asyncio.create_task(client.chat.completions.create(**CHAT))
    await asyncio.sleep(0.2)
    assert not late.done()

    async def finish(ran: Ran) -> None:
        got = len(ran.submit.delivered_tokens)
        ran.tokens(got, ids[got:], "length")

    cell.behave = finish
    cell.come_back()
    assert await stream == WORDS
    assert (await late).choices[0].message.content == WORDS
    assert [list(each.delivered_tokens) for each in cell.of(Submit)] == [ids[:5], []]


async def test_ready_follows_the_cell(gateway: GatewayProcess, cell: FakeCell) -> None:
    assert ready(gateway).json() == {"status": "ready", "layout": "dp2", "epoch": 1}
    cell.set_state(CellState("tp2", 2, False, 2, 1, 0, 2_048))
    await cell.until(lambda: ready(gateway).status_code == 503)
    error = ready(gateway).json()["error"]
    assert error["code"] == "not_serving"
    assert "1 of 2 ranks" in error["message"]
    cell.set_state(CellState("tp2", 2, True, 2, 2, 0, 2_048))
    await cell.until(lambda: ready(gateway).json().get("layout") == "tp2")


async def test_garbage_from_a_leader_harms_no_stream(
    gateway: GatewayProcess, client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    async def behave(ran: Ran) -> None:
        for frames in ([b""], [b"\xc1", b"\xc1"], [b"\x94\x00\x01\x01\x90", b"\x92\x00\xc1"]):
            cell.push_frames(gateway.facts["token_address"], frames)
        ran.tokens(0, ids, "length")

    cell.behave = behave
    answer = await client.chat.completions.create(**CHAT, stream=True)
    assert await text_of(answer) == WORDS


@pytest.mark.parametrize("silent_after", [0, 3], ids=["before the first token", "in the middle"])
async def test_a_stream_that_waits_says_that_it_lives(
    hasty: GatewayProcess, hasty_cell: FakeCell, ids: list[int], silent_after: int
) -> None:
    """Proxies cut connections on which nothing comes; clients skip the comments."""

    async def behave(ran: Ran) -> None:
        ran.tokens(0, ids[:silent_after])
        await asyncio.sleep(SILENT_S)
        ran.tokens(silent_after, ids[silent_after:], "length")

    hasty_cell.behave = behave
    told_s: list[float] = []

    async def read_raw() -> None:
        async with httpx.AsyncClient(base_url=hasty.url, timeout=30) as raw:
            began = time.monotonic()
            async with raw.stream("POST", PATH, json={**CHAT, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line == KEEP_ALIVE.decode().strip():
                        told_s.append(time.monotonic() - began)

    async def read_with_the_client() -> str:
        url = f"{hasty.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=20) as client:
            chunks = await client.chat.completions.create(**CHAT, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    _, text = await asyncio.gather(read_raw(), read_with_the_client())
    assert text == WORDS
    assert told_s, "nothing was said"
    print(f"said that it lives after {told_s[0]:.1f} s of silence")
    assert told_s[0] >= HASTY_S[KEEP_ALIVE_ENV]

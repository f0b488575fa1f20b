"""A real gateway process and the real OpenAI client; coordinator and leaders are the test's."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from coordinator.protocol.messages.gateway import Cancel, Done, Submit, TaskFailed
from coordinator.protocol.terms import Tier
from gateway.admission.permits import REFUSAL_HOLDS_S
from tests.harness.cells.gateway_cell import WAITED_MS, FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

WORDS = "the quick brown fox jumps over the lazy dog"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "say it"}]}


@pytest.fixture
def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> FakeCell:
    shared_cell.reset()
    return shared_cell


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(WORDS, add_special_tokens=False).ids)


def one_by_one(ids: list[int], end: str = "length", **how: Any) -> Any:
    """A leader that pushes one token at a time and then ends; the token of a stop is no text."""
    tokens = ids if end == "length" else [*ids, ids[0]]

    async def behave(ran: Ran) -> None:
        for index, token in enumerate(tokens):
            ran.tokens(index, [token], end if index == len(tokens) - 1 else None, **how)
            await asyncio.sleep(0.001)

    return behave


async def test_chat(client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]) -> None:
    cell.behave = one_by_one(ids)
    answer = await client.chat.completions.create(**CHAT, max_tokens=len(ids))
    [choice] = answer.choices
    assert choice.message.content == WORDS
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)
    [submit] = cell.of(Submit)
    assert answer.usage.prompt_tokens == submit.header.prompt_tokens
    assert submit.header.max_tokens == len(ids)
    await cell.until(lambda: cell.of(Done))
    assert [done.task for done in cell.of(Done)] == [submit.header.task]


async def test_stream_with_usage(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    cell.behave = one_by_one(ids)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **CHAT, max_tokens=len(ids), stream=True, stream_options={"include_usage": True}
        )
    ]
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(each.delta.content or "" for each in deltas) == WORDS
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)


async def test_completion_with_logprobs(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int], tokenizer: Tokenizer
) -> None:
    cell.behave = one_by_one(ids, logprobs=2)
    answer = await client.completions.create(
        model="demo", prompt="x", max_tokens=len(ids), logprobs=2
    )
    [choice] = answer.choices
    assert choice.text == WORDS
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(
        [-(index + 1) / 100 for index in range(len(ids))]
    )
    assert "".join(choice.logprobs.tokens or []) == WORDS


async def test_two_choices_are_two_tasks_with_seeds_of_their_own(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    seeds: list[int] = []

    async def behave(ran: Ran) -> None:
        seeds.append(ran.request.sampling_params.seed)
        await one_by_one(ids[: 2 if ran.id.startswith("0_") else 4])(ran)

    cell.behave = behave
    answer = await client.chat.completions.create(**CHAT, n=2, max_tokens=8)
    contents = [choice.message.content for choice in answer.choices]
    assert all(WORDS.startswith(str(content)) for content in contents)
    assert len(set(contents)) == 2
    assert len(set(seeds)) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_seed_of_the_client_reaches_the_leader(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    seen: list[Ran] = []

    async def behave(ran: Ran) -> None:
        seen.append(ran)
        await one_by_one(ids)(ran)

    cell.behave = behave
    await client.chat.completions.create(**CHAT, seed=42)
    assert seen[0].request.sampling_params.seed == 42


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_and_cancels_the_task(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int], stream: bool
) -> None:
    async def endless(ran: Ran) -> None:
        for index in range(400):
            ran.tokens(index, [ids[index % len(ids)]])
            await asyncio.sleep(0.002)

    cell.behave = endless
    answer: Any = await client.chat.completions.create(**CHAT, stop=[" jumps"], stream=stream)
    if stream:
        chunks = [chunk.choices[0] async for chunk in answer]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        reason = chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("the quick brown fox", "stop")
    await cell.until(lambda: cell.of(Cancel), 1)
    await asyncio.sleep(0.2)
    assert len(cell.of(Cancel)) == 1, "late tokens of a cancelled task are no news"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_client_that_leaves_cancels_its_task(
    gateway: GatewayProcess, cell: FakeCell, ids: list[int], stream: bool, begun: bool
) -> None:
    async def slow(ran: Ran) -> None:
        if begun:
            ran.tokens(0, ids[:1])

    cell.behave = slow
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        call = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        task = asyncio.create_task(call)
        await cell.until(lambda: cell.of(Submit))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    cancelled = await cell.until(lambda: cell.of(Cancel), 1)
    assert [each.task for each in cancelled] == [cell.of(Submit)[0].header.task]


@pytest.mark.parametrize(
    ("headers", "body", "tier"),
    [
        ({}, {}, Tier.STANDARD),
        ({"X-Priority-Tier": "interactive"}, {"service_tier": "flex"}, Tier.INTERACTIVE),
        ({}, {"service_tier": "fast"}, Tier.INTERACTIVE),
        ({}, {"service_tier": "flex"}, Tier.BATCH),
        ({"X-Vllm-Priority": "-10"}, {"priority": -10}, Tier.STANDARD),
    ],
)
async def test_tier_reaches_the_coordinator_and_comes_back(
    gateway: GatewayProcess,
    cell: FakeCell,
    ids: list[int],
    headers: dict[str, str],
    body: dict[str, Any],
    tier: Tier,
) -> None:
    cell.behave = one_by_one(ids)
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, **body})
    assert response.status_code == 200
    assert response.headers["x-priority-tier"] == tier.name.lower()
    assert response.headers["x-queue-wait-ms"] == str(WAITED_MS)
    assert [submit.header.tier for submit in cell.of(Submit)] == [tier]


async def test_a_response(client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]) -> None:
    cell.behave = one_by_one(ids, end="stop")
    answer = await client.responses.create(
        model="demo", input="say it", store=True, extra_headers={"X-Request-Id": "me-7"}
    )
    assert (answer.output_text, answer.status) == (WORDS, "completed")
    assert answer.id.startswith("resp_me-7-")
    assert answer._request_id == "me-7"
    assert answer.service_tier == "default"
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ids) + 1


@pytest.mark.parametrize(("end", "last"), [("stop", "completed"), ("length", "incomplete")])
async def test_events_of_a_response(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int], end: str, last: str
) -> None:
    cell.behave = one_by_one(ids, end=end)
    stream = await client.responses.create(
        model="demo", input="say it", stream=True, service_tier="flex"
    )
    events: list[Any] = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == last
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == WORDS
    assert events[-1].response.output_text == WORDS
    for event in (events[0], events[-1]):
        assert event.response.service_tier == "flex"
    assert [submit.header.tier for submit in cell.of(Submit)] == [Tier.BATCH]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_refused_has_its_status(
    client: openai.AsyncOpenAI, cell: FakeCell, stream: bool
) -> None:
    """Although vLLM's stream begins before there is a token."""

    async def refuse(ran: Ran) -> None:
        cell.say(TaskFailed(ran.id, "queue_full", "Full.", 3))

    cell.behave = refuse
    with pytest.raises(openai.RateLimitError) as caught:
        await client.responses.create(model="demo", input="x", stream=stream)
    assert caught.value.code == "queue_full"
    headers = caught.value.response.headers
    assert 3_000 <= int(headers["retry-after-ms"]) <= 4_500
    assert headers["retry-after"] == str(math.ceil(int(headers["retry-after-ms"]) / 1_000))
    await asyncio.sleep(2 * REFUSAL_HOLDS_S)  # Until then the gateway refuses by itself.


async def test_a_response_that_breaks_off_ends_with_an_error(
    client: openai.AsyncOpenAI, gateway: GatewayProcess, cell: FakeCell, ids: list[int]
) -> None:
    async def begin(ran: Ran) -> None:
        ran.tokens(0, ids[:3])

    cell.behave = begin
    with pytest.raises(openai.APIError) as caught:
        async for event in await client.responses.create(model="demo", input="x", stream=True):
            if event.type == "response.output_text.delta":
                task = cell.of(Submit)[0].header.task
                cell.say(TaskFailed(task, "worker_lost", "Lost.", 0))
    assert (caught.value.code, caught.value.message) == ("worker_lost", "Lost.")
    assert "request_failed" not in gateway.log.read_text()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
async def test_state_and_tools_of_the_server_are_refused(
    client: openai.AsyncOpenAI, cell: FakeCell, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="demo", input="x", **body)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
    assert cell.of(Submit) == []


async def test_nothing_is_stored_of_a_response(client: openai.AsyncOpenAI, cell: FakeCell) -> None:
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await call("resp_1")
        assert (caught.value.code, caught.value.param) == ("not_found", "response_id")


async def test_request_id_of_the_client_names_the_task(
    client: openai.AsyncOpenAI, cell: FakeCell, ids: list[int]
) -> None:
    cell.behave = one_by_one(ids)
    answer = await client.chat.completions.create(**CHAT, extra_headers={"X-Request-Id": "trace-7"})
    assert answer._request_id == "trace-7"
    assert answer.id.startswith("chatcmpl-trace-7-")
    assert cell.of(Submit)[0].header.task.startswith(f"{answer.id}-")


async def test_model_is_listed_and_retrieved(client: openai.AsyncOpenAI, cell: FakeCell) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_tokenize_and_back(gateway: GatewayProcess, cell: FakeCell, ids: list[int]) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        body = {"model": "demo", "prompt": WORDS, "add_special_tokens": False}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        text = (await client.post("/detokenize", json={"model": "demo", "tokens": tokens})).json()
    assert tokens == ids
    assert text["prompt"] == WORDS


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model_not_found", "model"),
        ("/v1/chat/completions", {"model": "demo"}, 400, "invalid_value", "messages"),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400, "invalid_value", "temperature"),
        ("/v1/chat/completions", {**CHAT, "n": "many"}, 400, "invalid_value", "n"),
        ("/v1/completions", {"model": "demo", "prompt": [5] * 600}, 400, "context_length_exceeded",
         None),
        ("/v1/completions", {"model": "demo", "prompt": "x", "service_tier": "gold"}, 400,
         "invalid_value", "service_tier"),
        ("/v1/completions", "{", 400, "invalid_json", None),
        ("/v1/nothing", {}, 404, "unknown_url", None),
        ("/v1/models", {}, 405, "method_not_allowed", None),
    ],
)  # fmt: skip
async def test_errors_have_openai_s_shape(
    gateway: GatewayProcess,
    cell: FakeCell,
    path: str,
    body: Any,
    status: int,
    code: str,
    param: str | None,
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        response = await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert response.headers["x-request-id"]
    assert response.headers["x-priority-tier"]
    assert cell.of(Submit) == []


def test_no_route_of_vllm_answers_that_is_not_listed(
    gateway: GatewayProcess, cell: FakeCell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever vLLM registers, development routes included, is asked for in the real process."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    from vllm.entrypoints.launchers.app import build_app

    from gateway.engine import app as vllm_app
    from gateway.http.routes import BATCH_ROUTES, OWN_ROUTES, VLLM_ROUTES

    config = vllm_app.configure(str(MODEL_DIR), "demo", ["--max-model-len", "512"])
    app = build_app(config.args, ("generate",), config.vllm.model_config)
    asked = 0
    with httpx.Client(base_url=gateway.url) as client:
        for route in app.routes:
            path = getattr(route, "path", "").replace("{response_id}", "r")
            for method in getattr(route, "methods", None) or ("GET", "POST"):
                if (method, path) in VLLM_ROUTES | OWN_ROUTES | BATCH_ROUTES:
                    continue
                if path.startswith("/v1/responses/"):
                    continue  # Ours, see `test_nothing_is_stored_of_a_response`.
                response = client.request(method, path, json={})
                assert response.status_code in (404, 405), (method, path)
                error = response.json()["error"]
                if path.startswith("/v1/messages/"):
                    assert error["type"] in ("not_found_error", "invalid_request_error")
                else:
                    assert error["code"] in ("unknown_url", "method_not_allowed")
                asked += 1
    assert asked > 30

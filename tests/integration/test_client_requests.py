"""What clients in the wild ask for: a real gateway process, HTTP and real SDKs."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from coordinator.protocol.messages.gateway import Submit
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.gateway.client_bodies import (
    BODIES,
    CHAT,
    COMPLETION,
    PATH,
    RESPONSE,
    error_of,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

CONTEXT = 512
"""Tokens of the gateway's context."""


@pytest.fixture
async def client(gateway: GatewayProcess, cell: FakeCell) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def sdk(gateway: GatewayProcess, cell: FakeCell) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize("path", BODIES)
async def test_null_is_absent(client: httpx.AsyncClient, path: str) -> None:
    """Every parameter that OpenAI lets be null, at once."""
    nullable = {
        PATH: [
            *("audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs"),
            *("max_completion_tokens", "metadata", "modalities", "n", "parallel_tool_calls"),
            *("prediction", "presence_penalty", "reasoning_effort", "response_format", "seed"),
            *("service_tier", "stop", "store", "stream", "stream_options", "temperature"),
            *("tool_choice", "tools", "top_logprobs", "top_p", "user", "web_search_options"),
        ],
        "/v1/completions": [
            *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "n"),
            *("presence_penalty", "seed", "stop", "stream", "stream_options", "suffix"),
            *("temperature", "top_p", "user"),
        ],
        "/v1/responses": [
            *("background", "conversation", "include", "instructions", "max_tool_calls"),
            *("metadata", "parallel_tool_calls", "previous_response_id", "prompt", "reasoning"),
            *("service_tier", "store", "stream", "temperature", "text", "tool_choice", "tools"),
            *("top_logprobs", "top_p", "truncation", "user"),
        ],
    }[path]
    answer = await client.post(path, json={**BODIES[path], **dict.fromkeys(nullable)})
    assert answer.status_code == 200, answer.text


async def test_messages_as_sdks_dump_them_pass(client: httpx.AsyncClient) -> None:
    earlier = ChatCompletionMessage(role="assistant", content="yes").model_dump()
    assert earlier["tool_calls"] is None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "null"}}
    messages = [
        {"role": "system", "content": "be short", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None},
        earlier,
        {"role": "user", "content": "go", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "null"},
        {"role": "user", "content": "so", "name": None},
    ]
    answer = await client.post(PATH, json={**CHAT, "messages": messages})
    assert answer.status_code == 200, answer.text


async def test_null_within_a_schema_stays(client: httpx.AsyncClient, cell: FakeCell) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": ["a", None], "default": None}}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": None}}
    answer = await client.post(PATH, json={**CHAT, "response_format": form})
    assert answer.status_code == 200, answer.text


async def test_equal_choices_at_temperature_0(client: httpx.AsyncClient, cell: FakeCell) -> None:
    params: list[Any] = []

    async def behave(ran: Ran) -> None:
        params.append(ran.request.sampling_params)
        ran.tokens(0, [300, 301], "length")

    cell.behave = behave
    for path in (PATH, "/v1/completions"):
        answer = await client.post(path, json={**BODIES[path], "n": 2, "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 2
    assert [each.temperature for each in params] == [0.0] * 4


@pytest.mark.parametrize("path", BODIES)
async def test_top_p_of_0_takes_the_likeliest(
    client: httpx.AsyncClient, cell: FakeCell, path: str
) -> None:
    params: list[Any] = []

    async def behave(ran: Ran) -> None:
        params.append(ran.request.sampling_params)
        ran.tokens(0, [300, 301], "length")

    cell.behave = behave
    answer = await client.post(path, json={**BODIES[path], "top_p": 0, "temperature": 1})
    assert answer.status_code == 200, answer.text
    assert [(each.top_k, each.top_p) for each in params] == [(1, 1.0)]


def tool(name: str, words: int = 1) -> dict[str, Any]:
    field = {"type": "string", "description": "what this is for " * words}
    parameters = {"type": "object", "properties": {f"p{i}": field for i in range(20)}}
    return {
        "type": "function",
        "function": {"name": name, "description": "does it", "parameters": parameters},
    }


@pytest.mark.parametrize(("count", "words"), [(22, 10), (128, 1)])
async def test_tool_sets_of_tool_servers_pass(
    client: httpx.AsyncClient, count: int, words: int
) -> None:
    """They are bounded by the body's limit and the context alone: here they are not shown."""
    tools = [tool(f"f{i}", words) for i in range(count)]
    assert len(json.dumps(tools)) > 75_000
    answer = await client.post(PATH, json={**CHAT, "tools": tools, "tool_choice": "none"})
    assert error_of(answer)[1] == "context_length_exceeded" if answer.is_error else True
    assert answer.status_code in (200, 400)


async def test_a_prompt_without_room_has_one_code(client: httpx.AsyncClient) -> None:
    for length in (CONTEXT, CONTEXT + 1, CONTEXT * 2):
        for extra in ({}, {"max_tokens": 1}):
            body = {"model": "demo", "prompt": [300] * length, **extra}
            answer = await client.post("/v1/completions", json=body)
            assert error_of(answer) == (400, "context_length_exceeded", None), length
    body = {"model": "demo", "prompt": [300] * (CONTEXT - 1), "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_truncation_leaves_room_for_a_token(
    client: httpx.AsyncClient, cell: FakeCell
) -> None:
    long = "the quick brown fox " * CONTEXT
    chat = {"model": "demo", "messages": [{"role": "user", "content": long}]}
    bodies = {
        "/v1/responses": {"model": "demo", "input": long, "truncation": "auto"},
        "/v1/completions": {"model": "demo", "prompt": long, "truncate_prompt_tokens": -1},
        PATH: {**chat, "truncate_prompt_tokens": -1},
    }
    for path, body in bodies.items():
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    for submit in cell.of(Submit):
        assert submit.header.prompt_tokens == CONTEXT - 1
        assert submit.header.max_tokens == 1


WRONG_SHAPES: list[tuple[dict[str, Any], str]] = [
    *(({"structured_outputs": each}, "structured_outputs") for each in ("x", [1], 7, True)),
    (
        {
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
        },
        "tools",
    ),
    (
        {
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [{"type": "function", "function": {"parameters": {}}}],
        },
        "tools",
    ),
    ({"tools": [], "tool_choice": "auto"}, "tools"),
    ({"tools": []}, "tools"),
    ({"stream_interval": 10**30}, "stream_interval"),
    ({"stream_interval": 10**30, "stream": True}, "stream_interval"),
    ({"seed": -(10**30)}, "seed"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_SHAPES)
async def test_wrong_shapes_name_the_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(PATH, json={**CHAT, **fields})
    status, code, named = error_of(answer)
    assert (status, code) == (400, "invalid_value"), answer.text
    assert named is not None
    assert named.partition(".")[0] == param, answer.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "f", "schema": {"type": "nonsense"}},
                }
            },
            "response_format",
            "schema",
        ),
        ({"structured_outputs": {"regex": "(SECRET"}}, "structured_outputs", "regular expression"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "reasoning"),
        ({"tools": []}, "tools", "must not be an empty array"),
        ({"temperature": -1}, "temperature", "non-negative"),
    ],
)
async def test_errors_name_the_field_and_the_rule(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await client.post(PATH, json={**CHAT, **fields})
    assert error_of(answer) == (400, "invalid_value", param), answer.text
    message = answer.json()["error"]["message"]
    assert words in message
    assert "SECRET" not in message
    assert "check its parameters and schemas" not in message


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"best_of": 3}, "best_of"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_honoured_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = await client.post(PATH, json={**CHAT, **fields, "stream": stream})
    assert error_of(answer) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize(
    "fields", [{"modalities": ["text"]}, {"function_call": "none"}, {"functions": []}]
)
async def test_what_asks_for_nothing_passes(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    assert (await client.post(PATH, json={**CHAT, **fields})).status_code == 200


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 2, "n": 2}])
async def test_as_many_candidates_as_choices_are_honoured(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    answer = await client.post("/v1/completions", json={**COMPLETION, **fields})
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == fields.get("n", 1)


# ------------------------------------------------------------------ answers


async def test_the_same_idempotency_key_waits_for_the_first(
    client: httpx.AsyncClient, cell: FakeCell
) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()

    async def behave(ran: Ran) -> None:
        loop.call_soon_threadsafe(begun.set)
        while not release.is_set():
            await asyncio.sleep(0.01)
        ran.tokens(0, [300, 301], "length")

    cell.behave = behave
    headers = {"idempotency-key": "one"}
    first = asyncio.create_task(client.post(PATH, json=CHAT, headers=headers))
    await begun.wait()
    second = asyncio.create_task(client.post(PATH, json=CHAT, headers=headers))
    await asyncio.sleep(0.5)
    assert not second.done()
    release.set()
    answers = [await first, await second]
    assert [each.status_code for each in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert len(cell.of(Submit)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_an_incomplete_response_are_incomplete(
    client: httpx.AsyncClient, stream: bool
) -> None:
    answer = await client.post("/v1/responses", json={**RESPONSE, "stream": stream})
    assert answer.status_code == 200
    if not stream:
        response = answer.json()
    else:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        [done] = [event for event in events if event["type"] == "response.output_item.done"]
        assert done["item"]["status"] == "incomplete"
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["incomplete"]


@pytest.mark.parametrize("path", BODIES)
async def test_answers_under_one_request_id_have_ids_of_their_own(
    client: httpx.AsyncClient, path: str
) -> None:
    headers = {"x-request-id": "trace-7"}
    answers = [await client.post(path, json=BODIES[path], headers=headers) for _ in range(2)]
    assert [each.headers["x-request-id"] for each in answers] == ["trace-7", "trace-7"]
    ids = {each.json()["id"] for each in answers}
    assert len(ids) == 2
    assert all("trace-7" in each for each in ids)


def test_what_was_cached_is_reported(sdk: openai.OpenAI, cell: FakeCell) -> None:
    chat = sdk.chat.completions.create(**CHAT)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    text = sdk.completions.create(**COMPLETION)
    assert text.usage is not None
    assert text.usage.prompt_tokens_details is not None

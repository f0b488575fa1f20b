"""What clients in the wild send: a real gateway process, raw sockets and real SDKs."""

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from backports import zstd
from openai.types.chat import ChatCompletionMessage

from coordinator.protocol.messages.gateway import Submit
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "say it"}],
    "max_tokens": 2,
}
PATH = "/v1/chat/completions"
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "say it", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "say it", "max_output_tokens": 2}
BODIES = {PATH: CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE}
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


def raw(gateway: GatewayProcess, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    return answer


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


# ------------------------------------------------------------------ bodies


@pytest.mark.parametrize("text", ['{"x": "\\ud83d\\ude00"}', "D:\\udev", "\\\\ud83d", "😀"])
@pytest.mark.parametrize("path", BODIES)
async def test_text_that_is_itself_json_passes(
    client: httpx.AsyncClient, text: str, path: str
) -> None:
    body = json.loads(json.dumps(BODIES[path]))
    if path == PATH:
        body["messages"][0]["content"] = text
    else:
        body["prompt" if "prompt" in body else "input"] = text
    answer = await client.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 200, answer.text


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\\\ud83d", r"\ud83d\\ude00"])
async def test_half_a_character_is_refused(client: httpx.AsyncClient, half: str) -> None:
    content = json.dumps(CHAT).replace("say it", half)
    answer = await client.post(PATH, content=content, headers=JSON)
    assert error_of(answer)[:2] == (400, "invalid_json")


def encode(encoding: str, data: bytes) -> bytes:
    match encoding:
        case "gzip" | "x-gzip":
            return gzip.compress(data)
        case "deflate":
            return zlib.compress(data)
        case "zstd":
            return zstd.compress(data)
    return data


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "zstd", "identity", "GZIP"])
@pytest.mark.parametrize("path", BODIES)
async def test_bodies_may_be_compressed(
    client: httpx.AsyncClient, encoding: str, path: str
) -> None:
    content = encode(encoding.lower(), json.dumps(BODIES[path]).encode())
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "nonsense"])
async def test_other_encodings_are_refused_with_the_list(
    client: httpx.AsyncClient, encoding: str
) -> None:
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(PATH, content=b"x" * 100, headers=headers)
    assert error_of(answer)[:2] == (415, "unsupported_media_type")
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert "gzip, deflate, zstd" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_is_refused_at_the_limit(client: httpx.AsyncClient, encoding: str) -> None:
    content = encode(encoding, b" " * (256 * 1024**2))
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(PATH, content=content, headers=headers)
    assert error_of(answer)[:2] == (413, "request_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", [1, 10, -3])
async def test_what_is_not_in_its_encoding_is_refused(
    client: httpx.AsyncClient, encoding: str, cut: int
) -> None:
    content = encode(encoding, json.dumps(CHAT).encode())[:cut]
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(PATH, content=content, headers=headers)
    assert answer.status_code == 400


# ------------------------------------------------------------------ connections


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = [
        b"POST /v1/chat/completions HTTP/" + version,
        *(b"Host: x", b"Content-Type: application/json"),
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join([*head, b"", b""]) + body


def test_offer_of_http_2_is_ignored(gateway: GatewayProcess, cell: FakeCell) -> None:
    """As Java's HttpClient offers it with its first request."""
    body = json.dumps(CHAT).encode()
    first = post(body, H2C.removesuffix(b"\r\n"))
    answer = raw(gateway, first + post(body, b"Connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b'"finish_reason":"length"') == 2


@pytest.mark.parametrize("path", BODIES)
def test_streams_to_http_1_0_have_no_chunks(
    gateway: GatewayProcess, cell: FakeCell, path: str
) -> None:
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    request = post(body, version=b"1.0").replace(b"/v1/chat/completions", path.encode())
    head, _, events = raw(gateway, request).partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith((b"data: {", b"event: response.created\n"))
    assert events.endswith(b"data: [DONE]\n\n") or b"event: response.incomplete" in events


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"POST /v1/nothing", b"404"), (b"POST /v1/chat/completions", b"415")],
)
def test_an_early_error_says_that_the_connection_closes(
    gateway: GatewayProcess, cell: FakeCell, request_line: bytes, status: bytes
) -> None:
    head = request_line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
    answer = raw(gateway, head + b"x" * 1_000)
    assert answer.split()[1] == status
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/demo", "/version"])
async def test_head_is_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PATCH", "/v1/batches/x", "GET, HEAD"),
    ],
)
async def test_answers_405_say_what_is_allowed(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await client.request(method, path)
    assert error_of(answer)[:2] == (405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


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

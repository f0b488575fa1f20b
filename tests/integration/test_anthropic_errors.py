"""Errors of Anthropic's Messages API, of requests and of the cell, from a real gateway."""

import asyncio
import gzip
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from coordinator.protocol.messages.gateway import TaskFailed
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.gateway.body_parts import copy_with, parts_of
from tests.harness.gateway.messages import (
    CANARY,
    COUNT,
    MESSAGE,
    PATH,
    TOOL,
    error_of,
    events_of,
)

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("gateway"),
    pytest.mark.usefixtures("cell"),
]


@pytest.fixture
def sdk(gateway: GatewayProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as sdk:
        yield sdk


UNSUPPORTED: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_decode": True},
    "ec_transfer_params": {"a": 1},
    "chat_template": "{{ 1 }}",
    "mm_processor_kwargs": {"a": 1},
    "container": "c",
    "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}],
    "output_format": {"type": "json_schema", "schema": {}},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "inference_geo": "eu",
    "fallbacks": [{"model": "x"}],
    "thread": {"id": "x"},
    "compaction": {"type": "x"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_honoured_is_refused(
    client: httpx.AsyncClient, name: str, stream: bool
) -> None:
    body = {**MESSAGE, name: UNSUPPORTED[name], "stream": stream}
    status, kind, text = error_of(await client.post(PATH, json=body))
    assert (status, kind) == (400, "invalid_request_error")
    assert text.startswith(name)
    null = await client.post(PATH, json={**MESSAGE, name: None})
    assert null.status_code == 200, null.text


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": []}},
        {"mcp_servers": []},
        {"cache_control": {"type": "ephemeral"}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive"}},
        {"output_config": {"effort": "high"}},
        {"top_p": 0},
        {"temperature": 0.0, "top_k": 4, "top_p": 0.5},
        {"mm_payload": "none"},
        {"vllm_xargs": {"a": 1}},
    ],
)
async def test_what_can_be_honoured_passes(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    answer = await client.post(PATH, json={**MESSAGE, **fields})
    assert answer.status_code == 200, answer.text


ERRORS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": CANARY}, 404, "not_found_error", "model"),
    ({"max_tokens": 5_000}, 400, "invalid_request_error", "max_tokens=5000"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
    ({"temperature": -1}, 400, "invalid_request_error", "temperature must be non-negative"),
    ({"top_k": 10**30}, 400, "invalid_request_error", "top_k"),
    ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences cannot"),
    ({"stop_sequences": [CANARY] * 17}, 400, "invalid_request_error", "stop_sequences"),
    ({"stop_sequences": ["x" * 1_025]}, 400, "invalid_request_error", "stop_sequences"),
    ({"service_tier": CANARY}, 400, "invalid_request_error", "auto, standard_only"),
    ({"messages": []}, 400, "invalid_request_error", "at least one message"),
    ({"messages": CANARY}, 400, "invalid_request_error", "messages"),
    ({"messages": [{"role": CANARY, "content": ""}]}, 400, "invalid_request_error", "messages.0"),
    (
        {"messages": [{"role": "user", "content": "the quick brown fox " * 1_000}]},
        400,
        "invalid_request_error",
        "maximum context length",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": CANARY}}}},
        400,
        "invalid_request_error",
        "output_config: The JSON schema cannot be used",
    ),
    (
        {
            "messages": [
                *MESSAGE["messages"],
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "tool_removal",
                            "tool": {"type": "tool_reference", "name": CANARY},
                        }
                    ],
                },
            ]
        },
        400,
        "invalid_request_error",
        "not declared in tools",
    ),
]


@pytest.mark.parametrize(("fields", "status", "kind", "words"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_the_form_of_the_api(
    client: httpx.AsyncClient,
    gateway: GatewayProcess,
    fields: dict[str, Any],
    status: int,
    kind: str,
    words: str,
    stream: bool,
) -> None:
    answer = await client.post(PATH, json={**MESSAGE, **fields, "stream": stream})
    assert error_of(answer)[:2] == (status, kind), answer.text
    assert words in error_of(answer)[2]
    assert CANARY not in answer.text
    assert CANARY not in gateway.log.read_text()


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("DELETE", COUNT, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("GET", f"{PATH}/batches/x", 404, "not_found_error"),
        ("POST", f"{PATH}/", 404, "not_found_error"),
    ],
)
async def test_other_methods_and_paths(
    client: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    answer = await client.request(method, path)
    assert error_of(answer)[:2] == (status, kind)
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    assert "openai-version" not in answer.headers


async def test_head_has_no_body(client: httpx.AsyncClient) -> None:
    answer = await client.head(PATH)
    assert (answer.status_code, answer.content) == (405, b"")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("content", "headers", "status", "kind"),
    [
        (b"{", {"content-type": "application/json"}, 400, "invalid_request_error"),
        (b"x", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        (
            gzip.compress(b" " * (9 * 1024**2)),
            {"content-type": "application/json", "content-encoding": "gzip"},
            413,
            "request_too_large",
        ),
        (
            b"{}",
            {"content-type": "application/json", "x-priority-tier": "x"},
            400,
            "invalid_request_error",
        ),
    ],
)
async def test_bodies_that_are_refused_at_once(
    client: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int, kind: str
) -> None:
    answer = await client.post(PATH, content=content, headers=headers)
    assert error_of(answer)[:2] == (status, kind)


def test_broken_http_has_the_form_of_the_api_too(gateway: GatewayProcess) -> None:
    head = b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 100 + b"\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(head)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 431 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert error["error"]["type"] == "invalid_request_error"
    assert b"request-id: " + error["request_id"].encode() in answer


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("code", "status", "kind", "raised"),
    [
        ("queue_full", 429, "rate_limit_error", anthropic.RateLimitError),
        ("no_healthy_workers", 503, "overloaded_error", anthropic.InternalServerError),
        ("worker_lost", 500, "api_error", anthropic.InternalServerError),
        ("deadline_exceeded", 504, "timeout_error", anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(
    sdk: Any,
    cell: FakeCell,
    gateway: GatewayProcess,
    code: str,
    status: int,
    kind: str,
    raised: type[anthropic.APIStatusError],
    stream: bool,
) -> None:
    async def behave(ran: Ran) -> None:
        cell.say(TaskFailed(ran.id, code, "It failed.", 3))

    cell.behave = behave
    with pytest.raises(raised) as caught:
        # A full queue is remembered for its tenant.
        tenant = {"x-gateway-inference-fairness-id": f"{code}-{stream}"}
        sdk.messages.create(**MESSAGE, stream=stream, extra_headers=tenant)
    error = caught.value
    assert error.status_code == status
    assert error.body == {
        "type": "error",
        "error": {"type": kind, "message": "It failed."},
        "request_id": error.request_id,
    }
    assert ("retry-after" in error.response.headers) == (status in (429, 503))
    assert "request_failed" not in gateway.log.read_text()


async def test_a_failure_in_a_stream_is_its_last_event(
    client: httpx.AsyncClient, cell: FakeCell, sdk: Any
) -> None:
    async def behave(ran: Ran) -> None:
        ran.tokens(0, [300, 301])
        await asyncio.sleep(0.3)
        cell.say(TaskFailed(ran.id, "no_healthy_workers", "All ranks are lost.", 0))

    cell.behave = behave
    body = {**MESSAGE, "max_tokens": 50, "stream": True}
    answer = await client.post(PATH, json=body)
    events = events_of(answer)
    assert [event["type"] for event in events[:3]] == [
        *("message_start", "content_block_start", "content_block_delta")
    ]
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "All ranks are lost."},
        "request_id": answer.headers["request-id"],
    }
    assert [event["type"] for event in events].count("error") == 1

    def read() -> None:
        list(sdk.messages.create(**body))

    with pytest.raises(anthropic.APIStatusError, match="All ranks are lost"):
        await asyncio.to_thread(read)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_a_message(
    client: httpx.AsyncClient, cell: FakeCell, stream: bool
) -> None:
    async def behave(_: Ran) -> None:
        return

    cell.behave = behave
    headers = {"x-request-deadline-ms": "200"}
    answer = await client.post(PATH, json={**MESSAGE, "stream": stream}, headers=headers)
    assert error_of(answer)[:2] == (504, "timeout_error")


# ------------------------------------------------------------------ shapes


EVERYTHING: dict[str, Any] = {
    **MESSAGE,
    "metadata": {"user_id": "u"},
    "stop_sequences": ["zz"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
    "service_tier": "auto",
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "tools": [{**TOOL, "type": "custom", "strict": True, "defer_loading": False}],
    "tool_choice": {"type": "none", "name": "f", "disable_parallel_tool_use": True},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "cache_salt": "x",
    "vllm_xargs": {"a": 1},
    "chat_template_kwargs": {"a": 1},
    "mm_payload": "none",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [
                        {"type": "text", "text": "r"},
                        {"type": "tool_reference", "tool_name": "f"},
                    ],
                }
            ],
        },
        {
            "role": "system",
            "content": [
                {
                    "type": "tool_addition",
                    "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "h"}},
                },
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "h"}},
            ],
        },
        {"role": "user", "content": "z"},
    ],
}
VALUES: list[Any] = [
    *(None, True, -1, 1.5, 10**30, "", "text", [], ["x"], [{}], {}, {"type": "url"}),
    *([{"type": "text"}], [{"type": "tool_reference", "name": {"a": 1}}]),
]
PARTS_MIN = 80
"""Parts of `EVERYTHING`, each of which takes all values in turn."""


async def test_no_part_of_any_type_is_a_failure(
    client: httpx.AsyncClient, gateway: GatewayProcess
) -> None:
    """Each part of a request takes a value of each type; whole, streamed or counted in turn."""
    whole = await client.post(PATH, json=EVERYTHING)
    assert whole.status_code == 200, whole.text
    paths = list(parts_of(EVERYTHING))
    assert len(paths) >= PARTS_MIN
    failures = []
    for number, (path, value) in enumerate(itertools.product(paths, VALUES)):
        body = copy_with(EVERYTHING, path, value)
        route = COUNT if number % 3 == 2 else PATH
        if number % 3 == 1 and path != ("stream",):
            body["stream"] = True
        answer = await client.post(route, json=body)
        is_vague = "check its parameters" in answer.text
        if is_vague or (answer.status_code != 200 and error_of(answer)[1] == "api_error"):
            failures.append((path, value, answer.text))
    assert not failures
    assert "request_failed" not in gateway.log.read_text()

"""Each parameter of each route with values of each type: no answer is a failure of the server's.

Each day sends a part of the pairs, drawn by the date; the long run sends all of them, whole and
streamed.
"""

import datetime
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.http.routes import VLLM_ROUTES
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess
from tests.harness.gateway.body_parts import copy_with, parts_of
from tests.harness.gateway.client_bodies import BODIES, PATH
from tests.harness.gateway.short_answers import answer_shortly

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("gateway")]

VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**30, "", "text", [], ["x"], [1], [{}], [[]], {}),
    *({"type": "function"}, [{"type": "function"}], {"type": "json_schema", "json_schema": []}),
]
EVERYTHING: dict[str, dict[str, Any]] = {
    PATH: {
        "messages": [
            {"role": "system", "content": "be short", "name": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
    },
    "/v1/completions": {"prompt": ["say it"], "stream_options": {"include_usage": True}},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    },
    "/tokenize": {"prompt": "say it"},
    "/detokenize": {"tokens": [300, 301]},
}
PAIRS_A_DAY = 500


@pytest.fixture
def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> FakeCell:
    shared_cell.reset()
    shared_cell.behave = answer_shortly
    return shared_cell


@pytest.fixture
async def client(gateway: GatewayProcess, cell: FakeCell) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


def fields_of(path: str) -> list[str]:
    """All parameters that vLLM has for a route."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    models: dict[str, Any] = {
        PATH: ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
    }
    return sorted(models[path].model_fields) if path in models else []


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Every pair of a part and a value, in an own request."""
    made = []
    for path, extra in EVERYTHING.items():
        whole = {**BODIES.get(path, {"model": "demo"}), **extra}
        simple = BODIES.get(path, whole)
        for way, value in itertools.product(parts_of(whole), VALUES):
            made.append((path, copy_with(whole, way, value)))
        for name, value in itertools.product(fields_of(path), VALUES):
            made.append((path, {**simple, name: value}))
    return made


def test_every_route_with_a_body_is_tried() -> None:
    others = {"/v1/messages", "/v1/messages/count_tokens"}
    assert EVERYTHING.keys() | others == {path for way, path in VLLM_ROUTES if way == "POST"}


@pytest.mark.parametrize(
    "is_short",
    [True, pytest.param(False, marks=[pytest.mark.long, pytest.mark.timeout(1_200)])],
)
async def test_no_type_of_any_parameter_is_a_failure(
    client: httpx.AsyncClient, gateway: GatewayProcess, is_short: bool
) -> None:
    drawn = requests()
    seed = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
    draw = random.Random(seed)
    if is_short:
        drawn = draw.sample(drawn, PAIRS_A_DAY)
    print(f"{len(drawn)} requests, seed {seed}")
    failures = []
    for path, body in drawn:
        if path in BODIES and "stream" not in body and draw.random() < 0.5:
            body["stream"] = True
        answer = await client.post(path, json=body)
        if answer.status_code >= 500 or (answer.is_error and "param" not in answer.text):
            failures.append((path, body, answer.text[:200]))
    assert not failures
    assert "request_failed" not in gateway.log.read_text()

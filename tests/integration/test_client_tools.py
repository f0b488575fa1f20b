"""Streamed and whole answers are the same with tools, as `aileron up` and the chart start them.

Real gateway processes with the demo model's options and with a parser that streams nothing; the
test plays the cell, so that answers may hold calls, which the demo model never makes.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from transformers import AutoTokenizer

from coordinator.cli.launch import DEMO_ENGINE_ARGS
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.cells.servers import ROOT
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway-tools")]

KIND = yaml.safe_load((ROOT / "helm/values/kind.yaml").read_text())["config"]["model"]
SILENT_PARSER = ["--enable-auto-tool-choice", "--tool-call-parser", "phi4_mini_json"]
STARTS = {
    "aileron up": list(DEMO_ENGINE_ARGS),
    "chart": KIND["engine_args"],
    "silent parser": SILENT_PARSER,
}

FUNCTION: Any = {"name": "set_size", "parameters": {"type": "object", "properties": {}}}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "say it"}]}
CHAT_TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "say it"}
RESPONSE_TOOLS: dict[str, Any] = {"tools": [{"type": "function", **FUNCTION}]}
CHOICES: list[dict[str, Any]] = [
    {},
    {"tool_choice": None},
    {"tool_choice": "auto"},
    {"tool_choice": "none"},
]
TEXTS = [
    "Plain text, in several tokens.",
    "one\n\ntwo < three [4] {5}\nand an end that may begin a call: <",
    '<tool_call> {"name": "set_size", "arg',
]
CALL = '{"name": "set_size", "arguments": {"size": [3], "name": "é"}}'
CALLS = {
    "granite4": f"Sure.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
    "phi4_mini_json": 'functools[{"name": "set_size", "arguments": {"size": 3}}]',
}


@pytest.fixture(scope="module", params=STARTS)
def gateway(
    request: pytest.FixtureRequest, own_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    process = GatewayProcess(folder, MODEL_DIR, own_cell, engine_args=STARTS[request.param])
    yield process
    process.close()


@pytest.fixture
def parser(request: pytest.FixtureRequest, gateway: GatewayProcess) -> str:
    """The parser of the gateway."""
    args: list[str] = STARTS[request.node.callspec.params["gateway"]]
    return args[args.index("--tool-call-parser") + 1]


class Answers:
    """Gives every request the same text, one token at a time."""

    def __init__(self, cell: FakeCell) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
        self._cell = cell

    def use(self, text: str) -> None:
        """Answer with this text from now on."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        end: int = self._tokenizer.eos_token_id

        async def answer(ran: Ran) -> None:
            for place, token in enumerate(ids):
                ran.tokens(place, [token])
                await asyncio.sleep(0.002)
            ran.tokens(len(ids), [end], "stop")

        self._cell.behave = answer


@pytest.fixture
def answers(own_cell: FakeCell, gateway: GatewayProcess) -> Answers:
    own_cell.reset()
    return Answers(own_cell)


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def sdk(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def chunks_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, as they are on the wire."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(
    "asked",
    [
        *(CHAT_TOOLS | choice for choice in CHOICES),
        # OpenAI refuses another choice without tools.
        *(choice for choice in CHOICES if choice != {"tool_choice": "auto"}),
    ],
    ids=str,
)
async def test_a_chat_streams_its_text(
    client: httpx.AsyncClient, answers: Answers, parser: str, asked: dict[str, Any]
) -> None:
    body = CHAT | asked
    for text in TEXTS:
        answers.use(text)
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert whole["message"]["content"] == text
        chunks = await chunks_of(client, "/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(each.get("content") or "" for each in deltas) == text
        assert not any(each.get("tool_calls") for each in deltas)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == whole["finish_reason"] == "stop"
    may_call = "tools" in asked and asked.get("tool_choice") != "none"
    if not (may_call and parser == "phi4_mini_json"):
        answers.use(TEXTS[0])
        assert len(await chunks_of(client, "/v1/chat/completions", body)) > 5


@pytest.mark.parametrize("tools", [RESPONSE_TOOLS, {}], ids=["tools", "no tools"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
async def test_a_response_streams_its_text(
    client: httpx.AsyncClient, answers: Answers, choice: dict[str, Any], tools: dict[str, Any]
) -> None:
    body = {**RESPONSE, **tools, **choice}
    for text in TEXTS:
        answers.use(text)
        whole = (await client.post("/v1/responses", json=body)).json()
        events = await chunks_of(client, "/v1/responses", body)
        for response in (whole, events[-1]["response"]):
            [message] = response["output"]
            assert [part["text"] for part in message["content"]] == [text]
        deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
        assert "".join(deltas) == text


def calls_of(sdk: openai.OpenAI) -> tuple[Any, Any]:
    """A chat's choice, whole, and as the SDK joins the stream's chunks."""
    whole = sdk.chat.completions.create(**CHAT, **CHAT_TOOLS)
    with sdk.chat.completions.stream(**CHAT, **CHAT_TOOLS) as stream:
        joined = stream.get_final_completion()
    return whole.choices[0], joined.choices[0]


def test_a_chat_streams_its_calls(sdk: openai.OpenAI, answers: Answers, parser: str) -> None:
    answers.use(CALLS[parser])
    choices = calls_of(sdk)
    found = [
        (choice.message.content or "", [call.function.name for call in choice.message.tool_calls])
        for choice in choices
    ]
    assert found[0] == found[1]
    assert found[0][1] == ["set_size"] * CALLS[parser].count("set_size")
    arguments = [
        [json.loads(call.function.arguments) for call in choice.message.tool_calls]
        for choice in choices
    ]
    assert arguments[0] == arguments[1]
    assert [choice.finish_reason for choice in choices] == ["tool_calls"] * 2


def test_a_response_streams_its_calls(sdk: openai.OpenAI, answers: Answers, parser: str) -> None:
    answers.use(CALLS[parser])
    whole: Any = sdk.responses.create(**RESPONSE, **RESPONSE_TOOLS)
    with sdk.responses.stream(**RESPONSE, **RESPONSE_TOOLS) as stream:
        joined: Any = stream.get_final_response()
    found = [
        [
            (item.name, json.loads(item.arguments))
            for item in response.output
            if item.type == "function_call"
        ]
        for response in (whole, joined)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == CALLS[parser].count("set_size")
    assert whole.output_text == joined.output_text

"""The real OpenAI client against the whole product, in dp2 and in tp2."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.harness.cells.listening import is_loopback, listening
from tests.harness.cells.product import MODEL_NAME, Product

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-product")]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_size",
        "description": "Set a size.",
        "parameters": SCHEMA,
        "strict": True,
    },
}
FREED_WITHIN_S, FREED_PART_MAX = 1.0, 0.1
"""After its client has left, a stream holds its pages so long, or this part of its own time."""
STREAM_TOKENS, READ_TOKENS = 1_500, 20


@pytest.fixture(scope="module")
def running(shared_product: Product) -> Product:
    """The product that modules share."""
    return shared_product


@pytest.fixture(params=["dp2", "tp2"])
def client(running: Product, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """A client of the product in each layout."""
    running.switch(request.param, "recompute")
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_nothing_listens_on_another_address_than_loopback(running: Product) -> None:
    """Not the store of torch's process groups either, which asks nobody for anything."""
    sockets = listening(running.process.pid)
    ports = {port for _, port, _ in sockets}
    assert {running.port, running.admin_port} <= ports
    assert any("worker" in command for _, _, command in sockets), "no rank listens"
    assert not [each for each in sockets if not is_loopback(each[0])]


def test_chat(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Explain `json.dumps`."}],
        max_tokens=24,
    )
    assert 0 <= int(raw.headers["x-queue-wait-ms"]) <= int(raw.headers["openai-processing-ms"])
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24
    assert answer._request_id


def test_streaming_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": "Write the function `posixpath.join`."}],
            max_tokens=16,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices].count(None) == len(chunks) - 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert 0 < chunks[-1].usage.completion_tokens <= 16


def test_responses(client: openai.OpenAI) -> None:
    """The same greedy answer, whole and as typed events."""
    asked: dict[str, Any] = {"model": MODEL_NAME, "input": "Explain `os.path`.", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=12)
    events: list[Any] = list(client.responses.create(**asked, max_output_tokens=12, stream=True))
    told = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert whole.output_text == told == events[-1].response.output_text != ""
    assert events[-1].type == f"response.{whole.status}"
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens == events[-1].response.usage.output_tokens <= 12


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL_NAME, prompt="import ", max_tokens=5, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value is not None
        assert 3 <= len(top) <= 4
        assert abs(value - max(top.values())) < 1e-6, "greedy takes the likeliest token"


def test_stop_strings(client: openai.OpenAI) -> None:
    plain = client.completions.create(
        model=MODEL_NAME, prompt="def main(", max_tokens=40, temperature=0
    )
    text = plain.choices[0].text
    stop = text[6:9]
    answer = client.completions.create(
        model=MODEL_NAME, prompt="def main(", max_tokens=40, temperature=0, stop=[stop]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]


def test_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Explain `os.path`."}],
        n=2,
        seed=5,
        temperature=1.0,
        max_tokens=16,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(
            model=MODEL_NAME, prompt="class Queue", max_tokens=20, temperature=1.0, seed=11
        )
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Give me a name and a size."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
        },
        max_tokens=80,
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"name", "size"}
    assert value["size"] in (1, 2, 3)


def test_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Set the size."}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "set_size"}},
        max_tokens=80,
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "set_size"
    assert set(json.loads(calls[0].function.arguments)) == {"name", "size"}


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": None},
        {"tool_choice": None},
    ],
    ids=["auto", "absent", "null", "null without tools"],
)
def test_text_streams_with_tools(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """The same greedy text, whole and streamed, in several chunks."""
    limits: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
    chat = {
        **limits,
        **asked,
        "messages": [{"role": "user", "content": "Explain `os.path`."}],
        "max_tokens": 16,
    }
    whole = client.chat.completions.create(**chat).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(**chat, stream=True)]
    texts = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert whole.message.content == "".join(texts)
    assert len(texts) > 3
    assert chunks[-1].finish_reason == whole.finish_reason
    functions = [{"type": "function", **tool["function"]} for tool in asked.get("tools", [])]
    response = {**limits, **asked, "input": "Explain `os.path`.", "max_output_tokens": 16}
    if functions:
        response["tools"] = functions
    answer = client.responses.create(**response)
    events: list[Any] = list(client.responses.create(**response, stream=True))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert answer.output_text == "".join(deltas) == events[-1].response.output_text
    assert len(deltas) > 3


def test_a_forced_call_streams(client: openai.OpenAI) -> None:
    """The same call, whole and streamed, for each way to force one."""
    for choice in ("required", {"type": "function", "function": {"name": "set_size"}}):
        chat: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "Set the size."}],
            "tools": [TOOL],
            "tool_choice": choice,
            "seed": 4,
            "max_tokens": 120,
        }
        whole = client.chat.completions.create(**chat).choices[0]
        with client.chat.completions.stream(**chat) as stream:
            joined = stream.get_final_completion().choices[0]
        calls: list[Any] = [each.message.tool_calls for each in (whole, joined)]
        assert [[call.function.name for call in each] for each in calls] == [["set_size"]] * 2
        arguments = [json.loads(each[0].function.arguments) for each in calls]
        assert arguments[0] == arguments[1]
        assert set(arguments[0]) == {"name", "size"}


def test_errors_have_openais_shape(client: openai.OpenAI, running: Product) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nonesuch", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL_NAME, prompt="x", temperature=-3)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL_NAME, prompt=[5] * 5000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    for path in ("/collective_rpc", "/sleep", "/metrics", "/v1/load_lora_adapter", "/pause"):
        answer = httpx.post(running.url + path, json={})
        assert answer.status_code in (404, 405), path
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_gone_client_frees_everything_soon(running: Product) -> None:
    running.switch("dp2", "recompute")

    def held() -> int:
        groups = running.get("/admin/layout")["groups"]
        return sum(g["running"] + g["waiting"] + g["pages_total"] - g["pages_free"] for g in groups)

    assert held() == 0
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": STREAM_TOKENS, "stream": True}
    with httpx.stream(
        "POST", running.url + "/v1/completions", json={**body, "ignore_eos": True}, timeout=30
    ) as answer:
        lines = answer.iter_lines()  # Dropping the iterator would close the connection.
        next(lines)
        began = time.monotonic()
        for _ in range(2 * READ_TOKENS):  # Each is followed by an empty line.
            next(lines)
        token_s = (time.monotonic() - began) / READ_TOKENS
        assert held() > 0
    left = time.monotonic()
    limit_s = max(FREED_WITHIN_S, FREED_PART_MAX * STREAM_TOKENS * token_s)
    while held() > 0:
        assert time.monotonic() - left < limit_s, "a gone client holds pages"
        time.sleep(0.02)
    print(f"freed after {time.monotonic() - left:.2f} s, within {limit_s:.2f} s")


def test_a_layout_that_cannot_be_is_refused_with_the_reason(running: Product) -> None:
    for layout in ("dp3", "tp4", "sp4", "nonsense", ""):
        answer = httpx.post(running.admin + "/admin/layout", json={"layout": layout})
        assert answer.status_code == 400, layout
        assert len(answer.json()["error"]["message"]) > 10
    answer = httpx.post(running.admin + "/admin/layout", json={"layout": "tp2", "carry": "hope"})
    assert answer.status_code == 400
    assert running.get("/admin/layout")["layout"] == "dp2"


@pytest.mark.timeout(400)
def test_a_batch_survives_its_gateway(running: Product) -> None:
    """Chat requests as lines of a file; the gateway is killed in the middle of them."""
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": f"Say {number}."}],
                "max_tokens": 0 if number == 7 else 60,
                "ignore_eos": True,
            },
        }
        for number in range(48)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=20) as client:
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"made": "here"},
        )
        before = _until(client, batch.id, lambda now: now.request_counts.completed > 0)
        os.kill(running.child("gateway"), signal.SIGKILL)
        killed = time.monotonic()
        _until_told(running, batch.id)
        print(f"killed at {before.request_counts}, told again after {_since(killed)}")
        # The batch, as `aileron status` shows it to people.
        shown = _status(running).partition("\n\nbatch ")[2].splitlines()
        assert shown[0].split() == ["status", "total", "completed", "failed"]
        assert any(line.split()[:3] == [batch.id, "in_progress", "48"] for line in shown)
        end = _until(client, batch.id, lambda now: now.status == "completed")
        print(f"ended after {_since(killed)}")
        output = client.files.content(end.output_file_id).text.splitlines()
        errors = client.files.content(end.error_file_id).text.splitlines()
        assert client.files.delete(end.output_file_id).deleted
    assert before.request_counts.completed < 48
    answers = [json.loads(line) for line in output]
    assert [each["custom_id"] for each in answers] == [f"c{n}" for n in range(48) if n != 7]
    tokens = [each["response"]["body"]["usage"]["completion_tokens"] for each in answers]
    assert tokens == [60] * 47
    assert end.usage.output_tokens == sum(tokens)
    assert end.request_counts.to_dict() == {"total": 48, "completed": 47, "failed": 1}
    (error,) = [json.loads(line) for line in errors]
    assert (error["custom_id"], error["response"]["status_code"]) == ("c7", 400)


def _status(running: Product) -> str:
    """What `aileron status` prints."""
    command = [sys.executable, "-m", "coordinator.cli", "status", "--admin-url", running.admin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _since(moment: float) -> str:
    return f"{time.monotonic() - moment:.1f} s"


def _until(client: openai.OpenAI, batch: str, condition: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 240
    while not condition(now := client.batches.retrieve(batch)):
        assert time.monotonic() < deadline, now
        assert now.status not in ("failed", "expired", "cancelled"), now
        time.sleep(0.05)
    return now


def _until_told(running: Product, batch: str) -> None:
    """Wait until the gateway that was killed is gone, and another one runs the batch."""
    deadline = time.monotonic() + 240
    while running.get("/admin/status")["gateways"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while not any(each["batch"] == batch for each in running.get("/admin/status")["batches"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""Requests and answers of Anthropic's Messages API, as tests send and read them."""

import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import httpx
from transformers import AutoTokenizer

from tests.harness.cells.gateway_cell import Ran
from worker.demo import MODEL_DIR

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
COUNTED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "say it"}],
}
MESSAGE: dict[str, Any] = {**COUNTED, "max_tokens": 2}
TOOL: dict[str, Any] = {
    "name": "set_size",
    "description": "Set a size.",
    "input_schema": {"type": "object", "properties": {"size": {"type": "integer"}}},
}
CANARY = "kanarienvogel"


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each named after its type."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error, whose form is checked."""
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, body["error"]["type"], body["error"]["message"]


@cache
def tokenizer() -> Any:
    """The demo model's."""
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def says(text: str) -> Callable[[Ran], Awaitable[None]]:
    """Answer with a text, a token at a time, and the end of the turn."""
    ids = tokenizer().encode(text, add_special_tokens=False)

    async def behave(ran: Ran) -> None:
        for place, token in enumerate(ids):
            ran.tokens(place, [token])
        ran.tokens(len(ids), [tokenizer().eos_token_id], "stop")

    return behave

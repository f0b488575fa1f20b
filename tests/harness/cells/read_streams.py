"""Streams of each API as clients read them: what was asked for, what came, and how it ended.

A stream is whole if every token that was asked for came, with its end; it is told if it ends with
an error that the client notices. Anything else is a silent truncation.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

WHOLE, TOLD, SILENT = "whole", "told", "SILENT TRUNCATION"
BEGUN_EVENTS = 5
"""A stream with so many events is in its middle."""
PATHS = {"completion": "completions", "chat": "chat/completions", "response": "responses"}
CHOICES = {"completion": 1, "chat": 2, "response": 1}
RESPONSE_ENDS = ("response.completed", "response.incomplete")


def asked(kind: str, model: str, tokens: int, seed: int) -> dict[str, Any]:
    """Return the body of a request for a stream of that many tokens per choice."""
    text = f"def number_{seed}("
    body = {"model": model, "stream": True, "ignore_eos": True, "seed": seed}
    counted = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    match kind:
        case "completion":
            return {**body, **counted, "prompt": text, "max_tokens": tokens}
        case "chat":
            said = [{"role": "user", "content": text}]
            return {**body, **counted, "messages": said, "n": CHOICES[kind], "max_tokens": tokens}
    return {**body, "input": text, "max_output_tokens": tokens}


@dataclass
class Reading:
    """What came of one stream."""

    kind: str
    tokens: int
    """Asked for, of each choice."""
    events: int = 0
    came: Counter[int] = field(default_factory=Counter)
    """Token ids by choice; a response's stream holds none."""
    finished: dict[int, str] = field(default_factory=dict)
    usage: int | None = None
    text: str = ""
    """Of a response: the pieces of its text together."""
    last: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        """Whether it is in its middle, or behind it."""
        return self.events >= BEGUN_EVENTS

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of an event."""
        if self.kind == "response":
            assert event["sequence_number"] == self.events
        self.events += 1
        self.last = event
        for choice in event.get("choices", ()):
            self.came[choice["index"]] += len(choice.get("token_ids") or ())
            if choice["finish_reason"]:
                self.finished[choice["index"]] = choice["finish_reason"]
        if event.get("usage"):
            self.usage = event["usage"]["completion_tokens"]
        if event.get("type") == "response.output_text.delta":
            self.text += event["delta"]
        elif event.get("type") in RESPONSE_ENDS:
            self.usage = event["response"]["usage"]["output_tokens"]

    def end(self) -> str:
        """Say what the stream is, now that it has ended without an error."""
        choices = range(CHOICES[self.kind])
        counted = self.usage == self.tokens * len(choices)
        if self.kind != "response":
            counted &= self.finished == dict.fromkeys(choices, "length")
            counted &= self.came == dict.fromkeys(choices, self.tokens)
        elif counted:
            parts = [part for item in self.last["response"]["output"] for part in item["content"]]
            counted = self.text == "".join(part["text"] for part in parts)
        return WHOLE if counted else SILENT


async def read_raw(client: httpx.AsyncClient, body: dict[str, Any], reading: Reading) -> str:
    """Read a stream's lines; the last one must be `[DONE]` where the API has it."""
    data = ""
    try:
        path = f"/v1/{PATHS[reading.kind]}"
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return TOLD
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    continue
                event = json.loads(data)
                if event.get("type") == "error" or "error" in event:
                    return TOLD
                reading.take(event)
    except httpx.TransportError:
        return TOLD
    if reading.kind != "response" and data != "[DONE]":
        return SILENT
    return reading.end()


async def read_with_openai(
    client: openai.AsyncOpenAI, body: dict[str, Any], reading: Reading
) -> str:
    """Read a stream with OpenAI's Python client."""
    known = {"ignore_eos", "return_token_ids"} | ({"seed"} if reading.kind == "response" else set())
    extra = {name: value for name, value in body.items() if name in known}
    plain = {name: value for name, value in body.items() if name not in known}
    creates: dict[str, Callable[..., Any]] = {
        "completion": client.completions.create,
        "chat": client.chat.completions.create,
        "response": client.responses.create,
    }
    try:
        async for event in await creates[reading.kind](**plain, extra_body=extra):
            reading.take(event.model_dump())
    except openai.APIError:
        return TOLD
    return reading.end()

"""The judge of truncated streams finds them: it is what the tests with killed processes go by."""

import json
from typing import Any

import httpx
import pytest

from tests.harness.cells.read_streams import SILENT, TOLD, WHOLE, Reading, asked, read_raw

TOKENS = 3


def chunk(index: int, ids: list[int], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "token_ids": ids, "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


CHAT = [chunk(0, [1]), chunk(1, [1, 2]), chunk(0, [2, 3], "length"), chunk(1, [3], "length")]
DONE = ["[DONE]"]


def response(text: str, tokens: int) -> list[Any]:
    final = {"usage": {"output_tokens": tokens}, "output": [{"content": [{"text": "ab"}]}]}
    return [
        {"type": "response.created", "sequence_number": 0},
        {"type": "response.output_text.delta", "delta": text, "sequence_number": 1},
        {"type": "response.incomplete", "response": final, "sequence_number": 2},
    ]


@pytest.mark.parametrize(
    ("kind", "events", "end"),
    [
        ("chat", [*CHAT, usage(6), *DONE], WHOLE),
        ("chat", [*CHAT, usage(6)], SILENT),
        ("chat", [*CHAT, *DONE], SILENT),
        ("chat", [*CHAT, usage(5), *DONE], SILENT),
        ("chat", [*CHAT[:-1], usage(6), *DONE], SILENT),
        ("chat", [CHAT[0], *CHAT[2:], usage(6), *DONE], SILENT),
        ("chat", [*CHAT[:1], {"error": {"code": "worker_lost"}}], TOLD),
        ("chat", [], SILENT),
        ("completion", [chunk(0, [1, 2, 3], "length"), usage(3), *DONE], WHOLE),
        ("completion", [chunk(0, [1, 2], "length"), usage(3), *DONE], SILENT),
        ("completion", [chunk(0, [1, 2, 3], "stop"), usage(3), *DONE], SILENT),
        ("response", response("ab", 3), WHOLE),
        ("response", response("a", 3), SILENT),
        ("response", response("ab", 2), SILENT),
        ("response", response("ab", 3)[:2], SILENT),
        ("response", [{"type": "error", "sequence_number": 0}], TOLD),
    ],
)
async def test_a_stream_is_whole_if_all_of_it_came(kind: str, events: list[Any], end: str) -> None:
    said = [event if isinstance(event, str) else json.dumps(event) for event in events]
    text = "".join(f"data: {line}\n\n" for line in said)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert await read_raw(client, asked(kind, "demo", TOKENS, 1), Reading(kind, TOKENS)) == end

"""Anthropic's Python client against the whole product, in dp2 and in tp2."""

import uuid
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.harness.cells.product import MODEL_NAME, Product

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-product")]

ASKED: dict[str, Any] = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Explain `os.path`."}],
    "max_tokens": 24,
    # No parameter of the client's any more, but one of the API's.
    "extra_body": {"temperature": 0.0},
}
SIZES = (1, 2, 3)
PAGE_TOKENS = 32
"""What a page holds in tp2; a multiple of what it holds in dp2."""
TOOL: dict[str, Any] = {
    "name": "set_size",
    "description": "Set a size.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"size": {"enum": list(SIZES)}},
        "required": ["size"],
        "additionalProperties": False,
    },
}


@pytest.fixture(params=["dp2", "tp2"])
def client(shared_product: Product, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of the product in each layout."""
    shared_product.switch(request.param, "recompute")
    with anthropic.Anthropic(base_url=shared_product.url, api_key="none", max_retries=0) as made:
        yield made


def prompt_tokens(used: Any) -> int:
    """The whole prompt: tokens that no cache has, and those that one keeps or gave.

    A prompt whose last page is exactly full is computed again for its last token, and vLLM counts
    that page as one that the cache begins to keep.
    """
    cached = (used.cache_creation_input_tokens or 0) + (used.cache_read_input_tokens or 0)
    return int(used.input_tokens) + cached


def test_a_message_is_the_chat_s_answer(client: Any, shared_product: Product) -> None:
    """The same greedy text from both APIs, whole and streamed."""
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    with openai.OpenAI(base_url=f"{shared_product.url}/v1", api_key="none") as chats:
        chat = chats.chat.completions.create(**ASKED)
    assert chat.choices[0].message.content == text != ""
    assert whole.content[0].to_dict()["text"] == streamed.content[0].to_dict()["text"] == text
    assert chat.usage is not None
    assert whole.stop_reason == streamed.stop_reason
    assert (
        whole.stop_reason
        == {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    )
    for message in (whole, streamed):
        used = message.usage
        assert used.output_tokens == chat.usage.completion_tokens
        assert prompt_tokens(used) == chat.usage.prompt_tokens


@pytest.mark.parametrize("fills_pages", [False, True], ids=["part of a page", "whole pages"])
def test_what_was_cached_is_counted_apart(client: Any, fills_pages: bool) -> None:
    words = f"{uuid.uuid4()} the quick brown fox " * 20
    while True:
        asked: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": words}]}
        counted = client.messages.count_tokens(model=MODEL_NAME, messages=asked["messages"])
        tokens = counted.input_tokens
        if (tokens % PAGE_TOKENS == 0) == fills_pages:
            break
        words += " a"
    # Each of the two groups of dp2 has a cache of its own.
    for _ in range(4):
        client.messages.create(**asked)
    used = client.messages.create(**asked).usage
    assert used.cache_read_input_tokens is not None
    assert used.cache_read_input_tokens > tokens // 2
    assert prompt_tokens(used) == tokens
    events: list[Any] = list(client.messages.create(**asked, stream=True))
    first, last = events[0].message.usage, events[-2].usage
    assert first.cache_read_input_tokens == last.cache_read_input_tokens > tokens // 2
    assert prompt_tokens(first) == prompt_tokens(last) == tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_size"}])
def test_a_forced_call_follows_the_tool_s_schema(client: Any, choice: Any) -> None:
    asked: dict[str, Any] = {**ASKED, "max_tokens": 120, "tools": [TOOL], "tool_choice": choice}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        call = message.content[-1]
        assert call.type == "tool_use"
        assert call.name == "set_size"
        assert isinstance(call.input, dict)
        assert call.input["size"] in SIZES


def test_a_schema_binds_the_text(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
    message = client.messages.create(**{**ASKED, "max_tokens": 60}, output_config=form)
    assert message.content[0].to_dict()["text"] in {f'{{"size": {size}}}' for size in SIZES} | {
        f'{{"size":{size}}}' for size in SIZES
    }

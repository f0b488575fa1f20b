"""What ends vLLM's rendering because of a request's shape is told as the request's fault."""

import asyncio
import json
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from coordinator.protocol.logs import FAILED_EVENTS
from gateway.engine.rendering import join_output_messages, refuse_unreadable
from gateway.http.body_form import rewrite

METHODS = {"render_chat": "messages", "render_completion": "prompt", "render_responses": "input"}


class Renderer:
    """Stands for vLLM's; each method does what it is given."""

    async def render_chat(self, request: Any, **_: Any) -> Any:
        return request()

    render_completion = render_responses = render_chat


def renderer() -> Any:
    made: Any = Renderer()
    refuse_unreadable(made)
    return made


def test_vllm_s_renderer_has_the_methods() -> None:
    assert all(asyncio.iscoroutinefunction(getattr(OnlineRenderer, name)) for name in METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [IndexError, KeyError, AttributeError, AssertionError])
def test_a_shape_that_is_not_expected_is_a_400(method: str, error: type[Exception]) -> None:
    def fail() -> None:
        raise error("a secret")

    with pytest.raises(VLLMValidationError) as caught:
        asyncio.run(getattr(renderer(), method)(fail, is_stream=True))
    assert caught.value.parameter == METHODS[method]
    assert "secret" not in str(caught.value)


def test_its_text_is_not_logged() -> None:
    assert "request_unreadable" in FAILED_EVENTS


@pytest.mark.parametrize("error", [MemoryError, ConnectionError, ValueError])
def test_other_failures_stay_what_they_are(error: type[Exception]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        asyncio.run(renderer().render_chat(fail))


def test_what_can_be_read_comes_through() -> None:
    assert asyncio.run(renderer().render_responses(lambda: "read")) == "read"


def test_inputs_that_are_one_text_stay() -> None:
    request = ResponsesRequest(input="And the sea?")
    join_output_messages(request)
    assert request.input == "And the sea?"


NULLABLE: list[dict[str, Any]] = [
    {"type": "image_generation_call", "id": "i", "status": "failed", "result": None},
    {
        "type": "code_interpreter_call",
        "id": "i",
        "container_id": "c",
        "status": "completed",
        "code": None,
        "outputs": None,
    },
    {
        "type": "computer_call",
        "id": "i",
        "call_id": "c",
        "status": "completed",
        "pending_safety_checks": [],
        "action": {"type": "double_click", "x": 1, "y": 2, "keys": None},
    },
]
"""Items of OpenAI's with members that must be there and may be null."""


@pytest.mark.parametrize("item", NULLABLE, ids=lambda item: item["type"])
def test_an_item_without_its_nulls_is_read_like_the_whole_one(item: dict[str, Any]) -> None:
    """vLLM knows the item either way, and names its type where it cannot serve it."""
    fields = {"model": "m", "input": [{"role": "user", "content": "x"}, item]}
    body = json.dumps(fields).encode()
    for each in (body, rewrite(body)):
        read = ResponsesRequest.model_validate(json.loads(each))
        with pytest.raises(VLLMValidationError, match=f"input item type: {item['type']}"):
            construct_input_messages(request_input=read.input)

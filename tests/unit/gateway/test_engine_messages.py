"""Errors of vLLM's Messages API are noted in words, on vLLM's own class without its engine."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMValidationError

from gateway.engine.messages import note_errors
from gateway.errors import RequestState, api_error, current_request

REQUEST = AnthropicMessagesRequest(
    model="demo", max_tokens=2, messages=[{"role": "user", "content": "say it"}]
)
STREAMED = REQUEST.model_copy(update={"stream": True})
CHUNK = (
    'data: {"id": "chatcmpl-1", "model": "demo", '
    '"choices": [{"index": 0, "delta": {"content": ""}}]}\n\n'
)
FAILED = 'data: {"error": {"message": "stop cannot be that", "code": 400, "param": "stop"}}\n\n'


@pytest.fixture
def state() -> Any:
    state = RequestState()
    token = current_request.set(state)
    yield state
    current_request.reset(token)


def serving(answer: Any) -> AnthropicServingMessages:
    """vLLM's object, whose chat completions are what is given."""

    async def complete(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = object.__new__(AnthropicServingMessages)
    made._merge_inline_system = False
    made.create_chat_completion = complete
    made.render_chat_request = complete
    note_errors(made)
    return made


async def chunks(*parts: str) -> AsyncIterator[str]:
    for part in parts:
        yield part


@pytest.mark.parametrize("method", ["create_messages", "count_tokens"])
async def test_an_answer_s_error_keeps_its_field(state: RequestState, method: str) -> None:
    info = ErrorInfo(message="The model `x` does not exist.", type="x", code=404, param="model")
    answer = await getattr(serving(ErrorResponse(error=info)), method)(REQUEST)
    assert isinstance(answer, ErrorResponse)
    assert state.failure is not None
    assert (state.failure.code, state.failure.param) == ("model_not_found", "model")


async def test_an_exception_becomes_an_answer(state: RequestState) -> None:
    error = VLLMValidationError("max_completion_tokens is too large.", parameter="max_tokens")
    answer = await serving(error).create_messages(REQUEST)
    assert isinstance(answer, ErrorResponse)
    assert state.failure is not None
    assert state.failure.message == "max_tokens is too large."
    assert state.failure.status == 400


async def test_a_bug_is_not_the_request_s_fault(state: RequestState) -> None:
    with pytest.raises(AttributeError):
        await serving(AttributeError("a bug")).create_messages(REQUEST)
    assert state.failure is None


async def test_a_stream_s_error_keeps_its_status(state: RequestState) -> None:
    stream = await serving(chunks(CHUNK, FAILED, CHUNK)).create_messages(STREAMED)
    events = [event async for event in stream]
    assert [event.partition("\n")[0] for event in events] == ["event: message_start"]
    assert state.failure is not None
    assert (state.failure.status, state.failure.message) == (400, "stop_sequences cannot be that")


async def test_a_failure_that_is_known_stays(state: RequestState) -> None:
    """A task's own failure comes before vLLM's words for it."""
    state.failure = api_error("queue_full", "Full.")
    stream = await serving(chunks(FAILED)).create_messages(STREAMED)
    assert [event async for event in stream] == []
    assert state.failure.code == "queue_full"


async def test_a_conversation_of_an_unexpected_shape_is_a_400(state: RequestState) -> None:
    odd = REQUEST.model_copy(deep=True)
    odd.messages[0].content = [object()]
    answer = await serving(None).create_messages(odd)
    assert isinstance(answer, ErrorResponse)
    assert state.failure is not None
    assert (state.failure.status, state.failure.param) == (400, "messages")

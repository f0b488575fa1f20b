"""Lets the errors of vLLM's Messages API reach the client in words (vLLM 0.32.0).

vLLM answers a Messages request by way of a chat completion. On that way errors lose their field,
and in a stream their status and words. Each error is noted where the HTTP side finds it, and vLLM
logs no stack for a request's fault. Where vLLM names a parameter of a chat completion, the error
names the one that it stands for. Tokens are counted also beyond the context. Called once, when
the front end is built.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Final

import msgspec
from pydantic import ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.renderers import TokenizeParams

from gateway.errors import ApiError, current_request, failed_event, shape_error

_UNREADABLE = "messages has a form that this server cannot read."
_OF_SHAPE = (LookupError, AttributeError, AssertionError, ValidationError)
"""What a conversation of an unexpected shape raises on its way to a chat completion."""
_FAULTS = (VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
"""What vLLM answers with a status of its own."""
_ERROR_CHUNK: Final = 'data: {"error"'
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop cannot": "stop_sequences cannot",
}
"""Names in vLLM's words about a chat completion -> names in a Messages request."""
_ANY_NAME = re.compile(r"\b(?:" + "|".join(_NAMES) + r")\b")

Serve = Callable[..., Awaitable[Any]]


def note_errors(serving: AnthropicServingMessages) -> None:
    """Note the errors of every request that this object serves."""
    serving.create_messages = _noting(serving.create_messages)
    serving.count_tokens = _noting(serving.count_tokens)
    serving.to_chat_completion_request = _converting(serving.to_chat_completion_request)
    serving.messages_full_converter = _completing(serving.messages_full_converter)
    convert = serving.message_stream_converter
    serving.message_stream_converter = lambda chunks: convert(_until_error(chunks))


def _noting(serve: Serve) -> Serve:
    @wraps(serve)
    async def serve_noting(*args: Any) -> Any:
        try:
            answer = await serve(*args)
        except _FAULTS as error:
            answer = create_error_response(error)
        if isinstance(answer, ErrorResponse):
            _note(answer)
        return answer

    return serve_noting


def _note(answer: ErrorResponse) -> None:
    """Note an error with its field, which Anthropic's form leaves out."""
    request = current_request.get()
    if request is not None and request.failure is None:
        body = msgspec.json.encode(answer.model_dump(mode="json"))
        request.failure = _renamed(shape_error(answer.error.code, body))


def _renamed(error: ApiError) -> ApiError:
    text = _ANY_NAME.sub(lambda match: _NAMES[match.group()], error.message)
    return replace(error, message=text)


def _converting(
    convert: Callable[..., ChatCompletionRequest],
) -> Callable[..., ChatCompletionRequest]:
    @wraps(convert)
    def convert_readable(*args: Any, **kwargs: Any) -> ChatCompletionRequest:
        try:
            chat = convert(*args, **kwargs)
        except _OF_SHAPE as error:
            raise VLLMValidationError(_UNREADABLE, parameter="messages") from error
        if isinstance(args[0], AnthropicCountTokensRequest):
            chat.__class__ = _CountedChat
        return chat

    return convert_readable


class _CountedChat(ChatCompletionRequest):  # type: ignore[misc]
    """A conversation whose tokens are counted alone, so that it may exceed the context."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return replace(super().build_tok_params(model_config), max_total_tokens=None)


def _completing(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Give a call that the limit on tokens cut off an empty input; vLLM reads it as JSON."""

    @wraps(convert)
    def convert_complete(answer: ChatCompletionResponse) -> Any:
        for call in answer.choices[0].message.tool_calls:
            if not _is_object(call.function.arguments):
                call.function.arguments = "{}"
        return convert(answer)

    return convert_complete


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


async def _until_error(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """End the stream at an error, which vLLM's converter does not know."""
    request = current_request.get()
    async for chunk in chunks:
        if chunk.startswith(_ERROR_CHUNK):
            if request is not None:
                request.failure = _renamed(failed_event(chunk.encode(), request.failure))
            return
        yield chunk

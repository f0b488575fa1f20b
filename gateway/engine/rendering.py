"""Corrects vLLM's rendering of messages where clients may expect otherwise (vLLM 0.32.0).

OpenAI's schema allows more than vLLM's rendering reads: an assistant's message without content, or
with a refusal, raises an exception that becomes a 500. Readable messages are converted to the form
that vLLM expects; any other failure is reported as the request's fault. A response's prompt begins
with the chat template's text, without a second beginning-of-text token.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import structlog
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from vllm.config import ModelConfig
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams

log = structlog.get_logger(__name__)

_OF_SHAPE = (LookupError, AttributeError, AssertionError)
"""Raised by Python for data of an unexpected shape; vLLM itself answers `TypeError` and
`ValueError` with 400."""

_FIELD = {"render_chat": "messages", "render_completion": "prompt", "render_responses": "input"}


def keep_to_the_template() -> None:
    """Stop the tokenizer from adding tokens to a response's prompt, as with chat completions.

    vLLM keeps the default, so the text would begin twice if the template begins it already.
    """
    build = ResponsesRequest.build_tok_params

    @wraps(build)
    def build_as_written(request: ResponsesRequest, model_config: ModelConfig) -> TokenizeParams:
        return replace(build(request, model_config), add_special_tokens=False)

    ResponsesRequest.build_tok_params = build_as_written


def keep_room_for_output() -> None:
    """Leave each prompt room for a token, and refuse one without room as one that is too long.

    vLLM lets a prompt of exactly the context's length pass, and then blames a `max_tokens` of 0
    that nobody sent. It truncates to the whole context where a request names no limit on output.
    """
    check = TokenizeParams._token_len_check

    @wraps(check)
    def check_with_room(params: TokenizeParams, tokenizer: Any, tokens: Any) -> Any:
        tokens = check(params, tokenizer, tokens)
        most = params.max_input_tokens
        if most is not None and len(tokens) >= most:
            raise VLLMValidationError(
                f"This model's maximum context length is {most} tokens. However, your prompt has "
                f"{len(tokens)} tokens, which leaves no room for output. Please shorten the prompt."
            )
        return tokens

    def truncate_to(params: TokenizeParams) -> int | None:
        most = params.max_input_tokens
        return None if most is None else max(0, most - 1)

    TokenizeParams._token_len_check = check_with_room
    TokenizeParams.max_truncation_tokens = property(truncate_to)


def allow_equal_choices() -> None:
    """Let a request have several choices at temperature 0, all equal, as OpenAI does."""
    SamplingParams._verify_greedy_sampling = lambda _: None


def join_output_messages(request: ResponsesRequest) -> None:
    """Join each model-written message into one text: vLLM reads only the first part."""
    if isinstance(request.input, str):
        return
    request.input = [_joined(item) for item in request.input]


def _joined(item: Any) -> Any:
    """Join a message that the API gave out, or one that a client wrote in the same form."""
    if isinstance(item, ResponseOutputMessage):
        joined = "".join(map(_text_of, item.model_dump()["content"]))
        text = ResponseOutputText(text=joined, type="output_text", annotations=[])
        return item.model_copy(update={"content": [text]})
    if isinstance(item, dict) and item.get("role") == "assistant":
        content = item.get("content")
        if isinstance(content, list) and all(map(_is_text, content)):
            return {**item, "content": "".join(map(_text_of, content))}
    return item


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and ("text" in part or "refusal" in part)


def _text_of(part: dict[str, Any]) -> str:
    return str(part.get("text") or part.get("refusal") or "")


def refuse_unreadable(renderer: OnlineRenderer) -> None:
    """Answer 400 if rendering fails because of a request's shape."""
    for method, field in _FIELD.items():
        setattr(renderer, method, _refusing(getattr(renderer, method), field))


def _refusing(render: Callable[..., Awaitable[Any]], field: str) -> Callable[..., Awaitable[Any]]:
    @wraps(render)
    async def rendered(*args: Any, **kwargs: Any) -> Any:
        try:
            return await render(*args, **kwargs)
        except _OF_SHAPE as error:
            # The log keeps the stack: it may still be a fault of the server.
            log.warning("request_unreadable", field=field, exc_info=True)
            raise VLLMValidationError(
                f"{field} has a form that this server cannot read.", parameter=field
            ) from error

    return rendered

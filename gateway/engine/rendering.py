"""What vLLM makes of a request's messages, where it is not what a client may expect (vLLM 0.32.0).

OpenAI's schema allows more than vLLM's rendering reads: a message of an assistant without content,
or with a refusal, ends it with an exception that becomes a 500. What can be read is put into the
form that it expects; whatever else ends it is the request's fault and told as that. And the prompt
of a response begins with what the chat template writes, not with one more beginning of a text.
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

log = structlog.get_logger(__name__)

_OF_SHAPE = (LookupError, AttributeError, AssertionError)
"""What Python raises where data has another shape than its reader thinks; `TypeError` and
`ValueError` vLLM answers with 400 itself."""

_FIELD = {"render_chat": "messages", "render_completion": "prompt", "render_responses": "input"}


def keep_to_the_template() -> None:
    """Let the tokenizer add nothing to a response's prompt, as with chat completions.

    vLLM leaves it the default, and models whose template begins a text begin it twice.
    """
    build = ResponsesRequest.build_tok_params

    @wraps(build)
    def build_as_written(request: ResponsesRequest, model_config: ModelConfig) -> TokenizeParams:
        return replace(build(request, model_config), add_special_tokens=False)

    ResponsesRequest.build_tok_params = build_as_written


def join_output_messages(request: ResponsesRequest) -> None:
    """Make each message that a model wrote before one text: vLLM reads the first part only."""
    if isinstance(request.input, str):
        return
    request.input = [_joined(item) for item in request.input]


def _joined(item: Any) -> Any:
    """A message as the API gave it out, or one that a client wrote in the same words."""
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
    """Answer 400 where rendering breaks off because of a request's shape."""
    for method, field in _FIELD.items():
        setattr(renderer, method, _refusing(getattr(renderer, method), field))


def _refusing(render: Callable[..., Awaitable[Any]], field: str) -> Callable[..., Awaitable[Any]]:
    @wraps(render)
    async def rendered(*args: Any, **kwargs: Any) -> Any:
        try:
            return await render(*args, **kwargs)
        except _OF_SHAPE as error:
            # The log tells where: it may still be a fault of the server.
            log.warning("request_unreadable", field=field, exc_info=True)
            raise VLLMValidationError(
                f"{field} has a form that this server cannot read.", parameter=field
            ) from error

    return rendered

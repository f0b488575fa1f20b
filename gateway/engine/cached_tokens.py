"""Corrects the number of cached tokens of a completion with several prompts (vLLM 0.32.0).

vLLM reports the prompt tokens of all prompts, and the cached ones of one prompt: of the last one in
a whole answer, of the first one with a token in a stream. `tests/integration/test_cached_tokens.py`
is the contract test.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import RequestOutput

_EVENT, _END = "data: ", "\n\n"
_NO_CHOICES = '"choices":[]'
"""Only the last chunk of a stream, with the usage of the whole, has no choices."""

Results = AsyncGenerator[tuple[int, RequestOutput], None]


def sum_cached_tokens(serving: OpenAIServingCompletion) -> None:
    """Make completions report the cached tokens of all their prompts."""
    make, stream = (
        serving.request_output_to_completion_response,
        serving.completion_stream_generator,
    )

    def make_summed(results: Sequence[RequestOutput], *args: Any) -> CompletionResponse:
        answer = make(list(results), *args)
        details = answer.usage.prompt_tokens_details
        if details is not None:
            details.cached_tokens = sum(each.num_cached_tokens or 0 for each in results)
        return answer

    async def stream_summed(
        request: Any, prompts: Any, results: Results, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        cached: dict[int, int] = {}
        async with aclosing(_note(results, cached)) as noted:
            async for event in stream(request, prompts, noted, *args, **kwargs):
                yield _correct(event, cached) if len(cached) > 1 else event

    serving.request_output_to_completion_response = make_summed
    serving.completion_stream_generator = stream_summed


async def _note(results: Results, cached: dict[int, int]) -> Results:
    """Yield the results, and note the cached tokens of each prompt."""
    async with aclosing(results):
        async for place, result in results:
            if place not in cached:
                cached[place] = result.num_cached_tokens or 0
            yield place, result


def _correct(event: str, cached: dict[int, int]) -> str:
    if _NO_CHOICES not in event:
        return event
    chunk = msgspec.json.decode(event.removeprefix(_EVENT))
    details = (chunk.get("usage") or {}).get("prompt_tokens_details")
    if details is None:
        return event
    details["cached_tokens"] = sum(cached.values())
    return _EVENT + msgspec.json.encode(chunk).decode() + _END

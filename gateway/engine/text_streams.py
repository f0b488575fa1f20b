"""Starts the text of an answer from the end of its prompt alone (vLLM 0.32.0).

vLLM gives a stream of text the whole prompt, and with the first token the tokenizer's library turns
all of it into text twice, in the event loop: 50 ms for 80,000 tokens, in which no stream gets a
token. A new token's text depends on the few tokens before it, so a stream begins with these.
"""

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

END_TOKENS = 64
"""Tokens at the end of a prompt with which a stream begins, at least."""

_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text as the stream does."""


def end_of_prompt(token_ids: Sequence[int], decode: Decode) -> Sequence[int]:
    """Return the last tokens of a prompt, after which text goes on as after the whole prompt.

    They have some text, since the first token of a text may lose its leading space. A prompt that
    ends in the middle of a character is returned whole: its stream repeats what it begins with.
    """
    size = END_TOKENS
    while size < len(token_ids):
        text = decode(token_ids[-size:])
        if text.endswith(_HALF_CHARACTER):
            return token_ids
        if text:
            return token_ids[-size:]
        size *= 2
    return token_ids


def begin_at_the_end() -> None:
    """Let all later streams of text begin with the end of their prompt."""
    begin = FastIncrementalDetokenizer.__init__

    @wraps(begin)
    def begin_late(
        stream: FastIncrementalDetokenizer, tokenizer: Any, request: EngineCoreRequest
    ) -> None:
        params, token_ids = request.sampling_params, request.prompt_token_ids
        if params is not None and token_ids is not None and len(token_ids) > END_TOKENS:
            skips = params.skip_special_tokens

            def decode(ids: Sequence[int]) -> str:
                text: str = tokenizer._tokenizer.decode(ids, skip_special_tokens=skips)
                return text

            # AsyncLLM goes on using its own.
            request = copy.copy(request)
            request.prompt_token_ids = list(end_of_prompt(token_ids, decode))
        begin(stream, tokenizer, request)

    FastIncrementalDetokenizer.__init__ = begin_late

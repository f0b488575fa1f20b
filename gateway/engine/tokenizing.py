"""Keeps short prompts from waiting while long ones are tokenized (vLLM 0.32.0).

vLLM tokenizes all prompts one after another in one thread, which takes more than 100 ms for a
prompt of 220 KB: a chat of a few words that arrives after ten such prompts waits for all of them.
Here long prompts have a thread of their own. The tokenizer's library lets other threads run.
"""

from asyncio import Future
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Final

from vllm.renderers import BaseRenderer, TokenizeParams, hf
from vllm.utils.async_utils import make_async

LONG_CHARS: Final = 16_384
"""A longer text takes more than some milliseconds."""


def copy_tokenizer_once_more() -> None:
    """Let renderers that are made later hold a copy of the tokenizer for one more thread.

    vLLM copies the tokenizer when more threads use it than it has copies for. That takes a second
    for a large vocabulary, and the thread may be the event loop's.
    """
    make_pool = hf.maybe_make_thread_pool

    @wraps(make_pool)
    def make_larger_pool(tokenizer: Any, copies: int = 1) -> Any:
        return make_pool(tokenizer, copies + 1)

    hf.maybe_make_thread_pool = make_larger_pool


def part_long_from_short(renderer: BaseRenderer[Any]) -> None:
    """Let the renderer tokenize long prompts in a thread of their own, one after another."""
    lane = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
    renderer._resources.callback(lane.shutdown, wait=False)
    tokenize_short = renderer._tokenize_prompt_async
    tokenize_long = make_async(renderer._tokenize_prompt, executor=lane)

    def tokenize(prompt: Any, params: TokenizeParams) -> Future[Any]:
        is_long = len(prompt["prompt"]) > LONG_CHARS
        begun: Future[Any] = (tokenize_long if is_long else tokenize_short)(prompt, params)
        return begun

    renderer._tokenize_prompt_async = tokenize

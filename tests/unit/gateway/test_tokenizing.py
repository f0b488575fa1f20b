"""Who waits for whom while prompts are tokenized."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from vllm.renderers import hf
from vllm.utils.async_utils import make_async

from gateway.engine.tokenizing import (
    LONG_CHARS,
    copy_tokenizer_once_more,
    part_long_from_short,
)

LONG, SHORT = "x" * (LONG_CHARS + 1), "x" * LONG_CHARS
LIMIT_S = 30


class Renderer:
    """Tokenizes in one thread as vLLM's does; a long prompt takes until `go_on`."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.done: list[str] = []
        self.at_once = self.most_at_once = 0
        self._resources = ExitStack()
        executor = ThreadPoolExecutor(1)
        self._resources.callback(executor.shutdown)
        self._tokenize_prompt_async: Any = make_async(self._tokenize_prompt, executor=executor)

    def _tokenize_prompt(self, prompt: dict[str, str], params: str) -> tuple[int, str]:
        is_long = len(prompt["prompt"]) > LONG_CHARS
        if is_long:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            assert self.go_on.wait(LIMIT_S)
            self.at_once -= 1
        self.done.append("long" if is_long else "short")
        return len(prompt["prompt"]), params

    def close(self) -> None:
        self.go_on.set()
        self._resources.close()


@pytest.fixture
def renderer() -> Any:
    made: Any = Renderer()
    part_long_from_short(made)
    yield made
    made.close()


async def test_a_short_prompt_does_not_wait_for_long_ones(renderer: Any) -> None:
    tokenize = renderer._tokenize_prompt_async
    long = [tokenize({"prompt": LONG}, "p") for _ in range(3)]
    async with asyncio.timeout(LIMIT_S):
        assert await tokenize({"prompt": SHORT}, "p") == (LONG_CHARS, "p")
    assert renderer.done == ["short"]
    renderer.go_on.set()
    assert await asyncio.gather(*long) == [(LONG_CHARS + 1, "p")] * 3
    assert renderer.done == ["short", "long", "long", "long"]
    assert renderer.most_at_once == 1, "long prompts take one core, as before"


async def test_a_fault_of_tokenizing_reaches_the_request(renderer: Any) -> None:
    renderer.done = None
    renderer.go_on.set()
    for prompt in (LONG, SHORT):
        with pytest.raises(AttributeError, match="append"):
            await renderer._tokenize_prompt_async({"prompt": prompt}, "p")


def test_each_thread_has_a_copy_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for vLLM's thread, one for the event loop's, and one for long prompts."""
    asked: list[int] = []

    def make_pool(_: object, copies: int = 1) -> None:
        asked.append(copies)

    monkeypatch.setattr(hf, "maybe_make_thread_pool", make_pool)
    copy_tokenizer_once_more()
    hf.maybe_make_thread_pool(None, 2)
    assert asked == [3]

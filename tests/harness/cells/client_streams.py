"""Fifty streams of the OpenAI client at once, as a cell that switches serves them."""

import asyncio
import itertools
from dataclasses import dataclass, field

import openai

from tests.harness.cells.product import MODEL_NAME

STREAMS = 50
TOKENS = 400
"""Of each stream: enough for streams to run through all switches on a fast machine."""
WORDS = ("def", "class", "import", "return", "with", "open", "the", "file", "and", "strings")


@dataclass
class Heard:
    """One stream as its client saw it."""

    text: list[str] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None


def prompt(number: int) -> str:
    """A prompt of 10 to 60 words, different for each stream."""
    words = itertools.islice(itertools.cycle(WORDS[number % 7 :] + WORDS), 10 + number)
    return f"# {number}\n" + " ".join(words)


async def stream(client: openai.AsyncOpenAI, number: int, tokens: int = TOKENS) -> Heard:
    """Half of the streams sample, half are greedy; all have seeds."""
    heard = Heard()
    chunks = await client.completions.create(
        model=MODEL_NAME,
        prompt=prompt(number),
        max_tokens=tokens,
        temperature=0.9 if number % 2 else 0.0,
        seed=number,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            heard.text.append(choice.text)
            if choice.finish_reason is not None:
                heard.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            heard.tokens = chunk.usage.completion_tokens
    return heard


async def all_streams(url: str, tokens: int = TOKENS) -> list[Heard]:
    """Run them at once and wait for all."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        streams = [stream(client, number, tokens) for number in range(STREAMS)]
        return await asyncio.gather(*streams)

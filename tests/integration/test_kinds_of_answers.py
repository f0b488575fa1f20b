"""Whatever clients ask for, the answer through switches is the answer without any."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.harness.cells.product import MODEL_NAME, Product

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-product")]

ROUNDS, ROUNDS_LONG = 2, 4
MESSAGES: Any = [{"role": "user", "content": "Write a function that opens a file."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 60},
        "size": {"enum": [1, 2, 3]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "set_size", "description": "Sets the size.", "parameters": SCHEMA},
}
SAID_ONCE = frozenset(
    {"id", "created", "created_at", "prompt_tokens_details", "input_tokens_details"}
)
"""What differs from one answer to the next."""

Ask = Callable[[openai.AsyncOpenAI, int], Awaitable[Any]]


async def choices(client: openai.AsyncOpenAI, seed: int) -> Any:
    """Three choices that sample, with log-probabilities."""
    return await client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        n=3,
        seed=seed,
        temperature=0.9,
        max_tokens=120,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )


async def penalised(client: openai.AsyncOpenAI, seed: int) -> Any:
    """Two prompts, the one of which is echoed, with penalties and words to stop at."""
    return await client.completions.create(
        model=MODEL_NAME,
        prompt=["import os\n", "def count(path):\n"],
        echo=True,
        seed=seed,
        temperature=0.7,
        max_tokens=150,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        stop=["\n\n\n", "class "],
    )


async def schema(client: openai.AsyncOpenAI, seed: int) -> Any:
    """An object of a schema, whose grammar goes on in the next group."""
    return await client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        seed=seed,
        max_completion_tokens=150,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
        },
    )


async def tool(client: openai.AsyncOpenAI, seed: int) -> Any:
    """A call of a tool."""
    return await client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        seed=seed,
        max_tokens=150,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "set_size"}},
    )


async def response(client: openai.AsyncOpenAI, _seed: int) -> Any:
    """A response of the newer API."""
    return await client.responses.create(
        model=MODEL_NAME,
        input="Write a function that opens a file.",
        temperature=0.0,
        max_output_tokens=120,
        extra_body={"ignore_eos": True},
    )


async def streamed(client: openai.AsyncOpenAI, seed: int) -> Any:
    """Text, finish reasons and usage of a stream with two choices."""
    text: dict[int, str] = {}
    found: dict[str, Any] = {"text": text, "reasons": {}}
    chunks = await client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        n=2,
        seed=seed,
        temperature=0.8,
        max_tokens=120,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                found["reasons"][choice.index] = choice.finish_reason
        if chunk.usage is not None:
            found["usage"] = chunk.usage.model_dump()
    return found


KINDS: dict[str, Ask] = {
    each.__name__: each for each in (choices, penalised, schema, tool, response, streamed)
}


def comparable(answer: Any, numbers: list[float]) -> Any:
    """An answer without what differs from one to the next, its log-probabilities apart."""
    if isinstance(answer, dict):
        kept = {key: value for key, value in answer.items() if key not in SAID_ONCE}
        return {key: comparable(value, numbers) for key, value in kept.items()}
    if isinstance(answer, list):
        return [comparable(each, numbers) for each in answer]
    if isinstance(answer, float):
        numbers.append(answer)
        return "a number"
    return comparable(answer.model_dump(), numbers) if hasattr(answer, "model_dump") else answer


async def all_kinds(url: str, rounds: int) -> dict[tuple[str, int], Any]:
    """Ask for all of them at once, several times each."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        asked = list(itertools.product(KINDS, range(rounds)))
        answers = await asyncio.gather(*(KINDS[kind](client, seed) for kind, seed in asked))
    return dict(zip(asked, answers, strict=True))


@pytest.fixture
def cell(shared_product: Product) -> Product:
    """The product that modules share, in the layout that the test begins with."""
    shared_product.switch("dp2", "recompute")
    return shared_product


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(ROUNDS_LONG, marks=pytest.mark.long)])
async def test_every_kind_of_answer_is_the_same_through_switches(
    cell: Product, rounds: int
) -> None:
    calm = await all_kinds(cell.url, rounds)
    running = asyncio.create_task(all_kinds(cell.url, rounds))
    switches = 0
    for layout in itertools.cycle(("tp2", "dp2")):
        await asyncio.sleep(0.2)
        if running.done():
            break
        await asyncio.to_thread(cell.switch, layout, "reshard")
        switches += 1
    switched = await running
    for who, answer in calm.items():
        expected: list[float] = []
        found: list[float] = []
        assert comparable(switched[who], found) == comparable(answer, expected), who
        assert found == pytest.approx(expected, abs=1e-3), who
    moved = cell.get(f"/admin/switches?last={switches}")["switches"]
    counts = [record["tasks"]["reshard"] for record in moved]
    print(f"{len(calm)} answers, tasks moved by each of {switches} switches: {counts}")
    assert sum(counts) >= len(calm)
    for seed in range(rounds):
        said = calm["schema", seed].choices[0].message.content
        assert set(json.loads(said)) == {"name", "size"}
        (call,) = calm["tool", seed].choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"name", "size"}
        # A prompt counts once, however many choices there are.
        usage = calm["choices", seed].usage
        assert usage.prompt_tokens == calm["streamed", seed]["usage"]["prompt_tokens"]
        assert usage.completion_tokens == 3 * 120

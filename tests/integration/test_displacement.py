"""An urgent request finds all KV in use by batch requests, on real ranks."""

import asyncio
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.terms import Tier
from coordinator.tasks.displacement import DISPLACE_AFTER_MS
from tests.harness.cells.bare_cell import Stream, TaskClient, bare_cell

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

ARGUMENTS = [
    *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32"),
    *("--block-size", "32", "--num-gpu-blocks-override", "48"),
]
"""KV for 1,504 tokens."""
PROMPT_TOKENS, TOKENS = 200, 750
FULL_TOKENS = 80
"""With as many tokens of each of the five, there is no room for a sixth.

On a busy machine they get hundreds more before a process that waits for cores lets the sixth in.
"""

GROWN_TOKENS = 400
"""Some 180 of each of four streams fill all KV."""


def prompt(name: str) -> list[int]:
    return random.Random(name).choices(range(10, 4000), k=PROMPT_TOKENS)


def submit(client: TaskClient, tier: Tier, tokens: int, *names: str) -> None:
    for name in names:
        client.submit(name, prompt(name), tier=tier, max_tokens=tokens, ignore_eos=True)


async def test_batch_streams_make_room_and_stay_exact(tmp_path: Path, record_property: Any) -> None:
    with bare_cell(tmp_path, ranks=1, engine_args=ARGUMENTS) as cell:
        client = TaskClient()
        async with client.connected(cell):
            names = [f"batch-{number}" for number in range(5)]
            submit(client, Tier.BATCH, TOKENS, *names)
            while min(len(client.streams[name].tokens) for name in names) < FULL_TOKENS:
                await asyncio.sleep(0.005)
            asked_s = time.monotonic()
            submit(client, Tier.INTERACTIVE, 20, "urgent")
            await client.wait_first_tokens("urgent")
            first_s = time.monotonic() - asked_s
            assert not any(client.streams[name].finished for name in names), "none had to end"
            assert first_s > DISPLACE_AFTER_MS / 1000, "there was no room at first"
            (urgent,) = await client.finish("urgent")
            streams = await client.finish(*names)
            of_name = {"urgent": urgent, **dict(zip(names[2:], streams[2:], strict=True))}
            await check_exact(client, of_name)
    record_property("summary", f"an urgent request in a full cell: first token {first_s:.2f} s")


async def test_streams_that_grow_into_the_kv_of_an_urgent_one_make_room_again(
    tmp_path: Path, record_property: Any
) -> None:
    with bare_cell(tmp_path, ranks=1, engine_args=ARGUMENTS) as cell:
        client = TaskClient()
        async with client.connected(cell):
            names = [f"batch-{number}" for number in range(3)]
            submit(client, Tier.BATCH, TOKENS, *names)
            await client.wait_first_tokens(*names)
            submit(client, Tier.INTERACTIVE, GROWN_TOKENS, "urgent")
            (urgent,) = await client.finish("urgent")
            assert not any(client.streams[name].finished for name in names), "none had to end"
            pause_s = max(after - before for before, after in pairwise(urgent.times))
            streams = await client.finish(*names)
            await check_exact(client, {"urgent": urgent, names[-1]: streams[-1]})
    record_property("summary", f"an urgent stream whose KV others grow into: {pause_s:.2f} s")


async def check_exact(client: TaskClient, streams: dict[str, Stream]) -> None:
    """Compare streams with those of the same requests alone."""
    for name, stream in streams.items():
        tokens = len(stream.tokens)
        client.submit(f"calm-{name}", prompt(name), max_tokens=tokens, ignore_eos=True)
        (calm,) = await client.finish(f"calm-{name}")
        assert stream.tokens == calm.tokens

"""Tasks of a killed rank go on from the KV that its memory still holds."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.gauges import all_there, settled_total, total

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

BLOCK_TOKENS = 32
PROMPT_TOKENS = 200
STREAMS = 16
TOKENS = 120
MOVE_TOKENS = 400
SUMMARY = "summary"

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 6, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("lost"),
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
    ) as running:
        yield running


def prompt(name: str) -> list[int]:
    return random.Random(name).choices(range(10, 4000), k=PROMPT_TOKENS)


@pytest.mark.parametrize(
    ("layout", "victim"), [("dp2", 1), ("dp2", 0), ("tp2", 1), ("tp2", 0), ("sp2", 0), ("sp2", 1)]
)
async def test_no_full_block_is_computed_again(
    cell: BareCell, layout: str, victim: int, record_property: Any
) -> None:
    await all_there(cell)
    cell.switch(layout, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        hits = await settled_total(cell, "lost_hits", 1 - victim)
        names = [f"{layout}-{victim}-{number}" for number in range(STREAMS)]
        for number, name in enumerate(names):
            client.submit(name, prompt(name), max_tokens=TOKENS, **KINDS[number % len(KINDS)])
        await until_all(client, names, 30)
        known = {name: len(client.streams[name].tokens) for name in names}
        os.kill(cell.get("/admin/ranks")["ranks"][victim]["pid"], signal.SIGKILL)
        streams = await client.finish(*names)
        moved = names if layout != "dp2" else [n for n in names if client.streams[n].resumed]
        assert moved, "no stream was on the lost rank"
        # All but the last token is looked up, and no stream has fewer tokens than then.
        full = sum((PROMPT_TOKENS + known[n] - 1) // BLOCK_TOKENS * BLOCK_TOKENS for n in moved)
        # More where the lost rank is back early, and tasks move to it and load once more.
        assert await total(cell, "lost_hits", hits + full) - hits >= full
        record_property(
            SUMMARY, f"killed rank {victim} of {layout}: {longest_pause_s(streams):.2f} s"
        )
        await all_there(cell)
        for number, (name, stream) in enumerate(zip(names[:4], streams, strict=False)):
            alone = await one(client, f"calm-{name}", prompt(name), **KINDS[number % len(KINDS)])
            assert stream.tokens == alone.tokens


@pytest.mark.parametrize(
    "delay_ms", [8, 20, *(pytest.param(each, marks=pytest.mark.chaos) for each in (1, 4, 12))]
)
async def test_a_rank_is_killed_while_a_switch_moves_its_tasks(
    cell: BareCell, delay_ms: int, record_property: Any
) -> None:
    """Its tasks go on from what the move has not overwritten: all of it, with pages to spare."""
    victim = delay_ms % 2
    await all_there(cell)
    cell.switch("dp2", "recompute")
    computed = await settled_total(cell, "computed_tokens", 1 - victim)
    client = TaskClient()
    async with client.connected(cell):
        names = [f"move-{delay_ms}-{number}" for number in range(STREAMS)]
        for number, name in enumerate(names):
            client.submit(name, prompt(name), max_tokens=MOVE_TOKENS, **KINDS[number % len(KINDS)])
        await until_all(client, names, 30)
        pid = cell.get("/admin/ranks")["ranks"][victim]["pid"]
        asked = asyncio.create_task(
            asyncio.to_thread(
                post, cell.admin + "/admin/layout", {"layout": "tp2", "carry": "reshard"}
            )
        )
        await asyncio.sleep(delay_ms / 1000)
        known = {name: len(client.streams[name].tokens) for name in names}
        os.kill(pid, signal.SIGKILL)
        streams = await client.finish(*names)
        await asked
        lost = [name for name in names if client.streams[name].resumed]
        there = sum(PROMPT_TOKENS + known[name] for name in lost)
        ideal = STREAMS * (PROMPT_TOKENS + MOVE_TOKENS) - there
        # The rank may be back before the streams end, and counts from 0.
        await all_there(cell)
        now = sum([await settled_total(cell, "computed_tokens", rank) for rank in range(2)])
        again = now - computed - ideal
        pause_s = longest_pause_s(streams)
        record_property(
            SUMMARY,
            f"killed {delay_ms} ms after the switch was asked for: {len(lost)} tasks lost, about "
            f"{again} tokens computed again, pause {pause_s:.2f} s",
        )
        assert lost
        assert again < len(names) * (BLOCK_TOKENS + 2)
        for number in range(0, STREAMS, len(KINDS)):
            client.submit(f"calm-{names[number]}", prompt(names[number]), max_tokens=MOVE_TOKENS)
        for number in range(0, STREAMS, len(KINDS)):
            (alone,) = await client.finish(f"calm-{names[number]}")
            assert streams[number].tokens == alone.tokens


async def one(client: TaskClient, name: str, tokens: list[int], **params: Any) -> Stream:
    client.submit(name, tokens, max_tokens=TOKENS, **params)
    return (await client.finish(name))[0]


async def until_all(client: TaskClient, names: list[str], tokens: int) -> None:
    while min(len(client.streams[name].tokens) for name in names) < tokens:
        await asyncio.sleep(0.005)


def longest_pause_s(streams: list[Stream]) -> float:
    return max(later - earlier for each in streams for earlier, later in pairwise(each.times))

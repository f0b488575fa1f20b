"""KV pages in host memory: written in one layout, read in another, after preemption and a loss."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

BLOCK_TOKENS = 32
PROMPT_TOKENS = 320
LAYOUTS = ("tp2", "dp2", "sp2", "dp2")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("host"),
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        limits={"host_kv_gib": 0.25},
    ) as running:
        yield running


def prompt(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(name).choices(range(10, 4000), k=tokens)


def gauges(cell: BareCell) -> list[dict[str, int]]:
    return [rank["gauges"] for rank in cell.get("/admin/ranks")["ranks"]]


async def total(cell: BareCell, name: str, at_least: int = 0) -> int:
    """The sum of a gauge over the ranks, once reports have brought it."""
    deadline = time.monotonic() + 5
    while True:
        found = sum(each.get(name, 0) for each in gauges(cell))
        if found >= at_least or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


async def one(client: TaskClient, name: str, tokens: list[int], **params: Any) -> Stream:
    client.submit(name, tokens, **params)
    return (await client.finish(name))[0]


async def test_pages_of_one_layout_are_read_in_each_other(cell: BareCell) -> None:
    """`recompute` forgets what ranks have cached, so whatever is hit comes from host pages."""
    cell.switch("tp2", "recompute")
    cell.switch("dp2", "recompute")
    client = TaskClient()
    async with client.connected(cell):
        cold = await one(client, "cold", prompt("a"), max_tokens=40)
        assert cold.cached_tokens == 0
        for number, layout in enumerate(LAYOUTS):
            cell.switch(layout, "recompute")
            warm = await one(client, f"warm-{number}", prompt("a"), max_tokens=40)
            assert warm.tokens == cold.tokens, layout
            assert warm.cached_tokens == PROMPT_TOKENS - BLOCK_TOKENS, layout
            # What this layout has computed is read in the next.
            fresh = await one(client, f"fresh-{number}", prompt(layout + str(number)), max_tokens=8)
            assert fresh.cached_tokens == 0
            following = LAYOUTS[(number + 1) % len(LAYOUTS)]
            cell.switch(following, "recompute")
            again = await one(client, f"again-{number}", prompt(layout + str(number)), max_tokens=8)
            assert again.tokens == fresh.tokens, (layout, following)
            assert again.cached_tokens == PROMPT_TOKENS - BLOCK_TOKENS, (layout, following)
    assert await total(cell, "host_pages_used", 1) > 0


async def test_tasks_of_a_killed_rank_compute_no_full_block_again(cell: BareCell) -> None:
    cell.switch("dp2", "recompute")
    client = TaskClient()
    async with client.connected(cell):
        names = [f"task-{number}" for number in range(16)]
        calm = [await one(client, f"calm-{n}", prompt(n, 200), max_tokens=120) for n in names[:4]]
        hits = await total(cell, "host_hits")
        for name in names:
            client.submit(name, prompt(name, 200), max_tokens=120)
        while min(len(client.streams[name].tokens) for name in names) < 30:
            await asyncio.sleep(0.005)
        victim = cell.get("/admin/ranks")["ranks"][1]
        before = gauges(cell)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        streams = await client.finish(*names)
        resumed = [stream for stream in streams if stream.resumed]
        assert resumed
        for stream, one_calm in zip(streams, calm, strict=False):
            assert stream.tokens == one_calm.tokens
        print(len(resumed), hits, before, gauges(cell))

"""KV pages in host memory: written in one layout, read in another, after preemption and a loss."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.gauges import all_there, gauges, settled_total, total
from tests.harness.cells.lost_ranks import renew
from tests.harness.faults.distrust import distrust
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

CELL_ARGS = ["--dtype", "float32", "--max-model-len", "1024"]
FEW_PAGES_BYTES = 12 << 20
SWAPPED = 20
BLOCK_TOKENS = 32
PROMPT_TOKENS = 320
ASIDE = "tests.harness.faults.aside_worker"
"""Copies beside steps, as on CUDA."""
GIFT_S = 0.3
"""A rank that does nothing looks six times meanwhile whether others want pages."""
LAYOUTS = ("tp2", "dp2", "sp2", "pp2", "tp2", "pp2", "dp2")


@pytest.fixture(scope="module", params=["worker", ASIDE])
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("host"),
        ranks=2,
        worker=request.param,
        engine_args=CELL_ARGS,
        model=model_of("four-layers", tmp_path_factory.mktemp("model")),
        limits={"host_kv_gib": 0.25, "pipelines": ["pp2"]},
    ) as running:
        yield running


def cell_in(
    folder: Path, limits: dict[str, Any], *engine_args: str
) -> AbstractContextManager[BareCell]:
    """A cell for one test."""
    (folder / "cell").mkdir()
    return bare_cell(
        folder / "cell",
        ranks=2,
        model=model_of("four-layers", folder),
        engine_args=[*CELL_ARGS, *engine_args],
        limits=limits,
    )


def prompt(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(name).choices(range(10, 4000), k=tokens)


async def one(client: TaskClient, name: str, tokens: list[int], **params: Any) -> Stream:
    client.submit(name, tokens, **params)
    return (await client.finish(name))[0]


async def test_pages_of_one_layout_are_read_in_each_other(cell: BareCell) -> None:
    """`recompute` empties the ranks' caches, so every hit comes from host pages."""
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
    await kill_under_streams(cell, "dp2", 1)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(1, id="first stage"),
        pytest.param(0, id="last stage", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize("cell", ["worker"], indirect=True)
async def test_tasks_of_a_killed_stage_compute_no_full_block_again(
    cell: BareCell, victim: int
) -> None:
    """Beside steps, a store follows with the next step of its task, after the tokens."""
    await kill_under_streams(cell, "pp2", victim)


async def kill_under_streams(cell: BareCell, layout: str, victim: int) -> None:
    """Kill a rank whose own memory nobody trusts; what is read again comes from host pages."""
    await all_there(cell)
    cell.switch(layout, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        hits = await settled_total(cell, "host_hits", 1 - victim)
        names = [f"{layout}-{victim}-{number}" for number in range(16)]
        for name in names:
            client.submit(name, prompt(name, 200), max_tokens=300, ignore_eos=True)
        await until_all(client, names, 30)
        pid = cell.get("/admin/ranks")["ranks"][victim]["pid"]
        assert distrust(pid)  # Else the others read its own memory.
        known = {name: len(client.streams[name].tokens) for name in names}
        os.kill(pid, signal.SIGKILL)
        streams = await client.finish(*names)
        moved = [n for n in names if layout != "dp2" or client.streams[n].resumed]
        assert len(moved) >= 2
        # All but the last token is looked up, and no stream has fewer tokens than then.
        full = sum((200 + known[name] - 1) // BLOCK_TOKENS * BLOCK_TOKENS for name in moved)
        # More where the lost rank is back early, and tasks move to it and load once more.
        assert await total(cell, "host_hits", hits + full) - hits >= full
        await all_there(cell)
        for name, stream in zip(names[:4], streams, strict=False):
            alone = await one(
                client, f"calm-{name}", prompt(name, 200), max_tokens=300, ignore_eos=True
            )
            assert stream.tokens == alone.tokens


async def test_a_renewed_cell_knows_the_prompts_of_the_former_one(cell: BareCell) -> None:
    await all_there(cell)
    cell.switch("tp2", "recompute")
    client = TaskClient()
    async with client.connected(cell):
        before = await one(client, "before", prompt("renewed"), max_tokens=20)
        await asyncio.to_thread(renew, cell)
        after = await one(client, "after", prompt("renewed"), max_tokens=20)
    assert after.tokens == before.tokens
    assert after.cached_tokens == PROMPT_TOKENS - BLOCK_TOKENS


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
async def test_a_leader_stores_in_the_host_pages_of_all_members(
    tmp_path: Path, layout: str
) -> None:
    """Pages of prompts that fill more than the leader's part are all loaded again."""
    with cell_in(tmp_path, {"host_kv_gib": 0.03, "layout": layout}) as running:
        client = TaskClient()
        async with client.connected(running):
            while not all(each.get("host_pages") for each in gauges(running)):
                await asyncio.sleep(0.1)
            pages = await total(running, "host_pages", 1)
            count = int(0.8 * pages * BLOCK_TOKENS / PROMPT_TOKENS)
            for number in range(count):
                await one(client, f"stored-{number}", prompt(f"stored-{number}"), max_tokens=1)
                await asyncio.sleep(GIFT_S)
            running.switch("dp2", "recompute")
            running.switch(layout, "recompute")
            for number in reversed(range(count)):
                again = await one(
                    client, f"again-{number}", prompt(f"stored-{number}"), max_tokens=1
                )
                assert again.cached_tokens == PROMPT_TOKENS - BLOCK_TOKENS, number
            assert await total(running, "host_pages", 1) == pages


async def until_all(client: TaskClient, names: list[str], tokens: int) -> None:
    while min(len(client.streams[name].tokens) for name in names) < tokens:
        await asyncio.sleep(0.005)


async def test_a_pipeline_group_loads_what_it_has_preempted(tmp_path: Path) -> None:
    """Its tasks need more pages than it has, and all of them fit host memory."""
    few_pages = "--kv-cache-memory-bytes", str(FEW_PAGES_BYTES)
    limits = {"host_kv_gib": 0.25, "pipelines": ["pp2"]}
    with cell_in(tmp_path, limits, *few_pages) as running:
        served: dict[str, list[list[int]]] = {}
        counts: dict[str, list[int]] = {}
        client = TaskClient()
        async with client.connected(running):
            for layout, salt in (("pp2", ""), ("dp2", "alone-")):
                running.switch(layout, "recompute")
                names = [f"{salt}{number}" for number in range(SWAPPED)]
                for number, name in enumerate(names):
                    given = prompt(f"swapped-{number}", 200)
                    client.submit(name, given, max_tokens=400, ignore_eos=True)
                served[layout] = [each.tokens for each in await client.finish(*names)]
                counts[layout] = [
                    await settled_total(running, name, 0, 1)
                    for name in ("preemptions", "host_hits")
                ]
    preemptions, hits = counts["pp2"]
    print(f"\n{preemptions} preemptions, {hits} tokens loaded")
    assert preemptions > 0
    assert hits > 0
    assert served["pp2"] == served["dp2"]

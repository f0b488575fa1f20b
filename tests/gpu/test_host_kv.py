"""KV pages in host memory on GPUs: a load gives the bits of the computation, also after a kill.

Needs an NVIDIA GPU and vLLM's CUDA build: `python -m pytest -m gpu tests/gpu`. With two GPUs, pages
that one layout has stored are read in the others.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coordinator.protocol.host_memory import AUTO_SHARE, memory_bytes
from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.gauges import settled_total, total
from tests.harness.cells.lost_ranks import pids_of, renew

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

PROMPT_TOKENS, ANSWER_TOKENS = 800, 24
BLOCK_TOKENS = 16
KV_BYTES = 24 << 20
"""So few that a handful of prompts fills it."""
STREAMS = 16


def ranks() -> int:
    return 2 if torch.cuda.device_count() > 1 else 1


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with bare_cell(
        tmp_path_factory.mktemp("host"),
        ranks=ranks(),
        engine_args=[*devices.CUDA_ENGINE, "--kv-cache-memory-bytes", str(KV_BYTES)],
        device="cuda",
        limits={"host_kv_gib": 1.0},
        lost_after_ms=3_000,
        lease_ms=2_500,
    ) as up:
        yield up


def prompt(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(name).choices(range(10, 4000), k=tokens)


async def one(client: TaskClient, name: str, ids: list[int]) -> Stream:
    client.submit(name, ids, max_tokens=ANSWER_TOKENS, logprobs=1)
    return (await client.finish(name))[0]


async def fill(client: TaskClient, tag: str) -> None:
    """Let other prompts take the device's pages."""
    names = [f"{tag}-{number}" for number in range(40)]
    for name in names:
        client.submit(name, prompt(name), max_tokens=2)
    await client.finish(*names)


async def test_a_prefix_that_left_the_device_is_loaded(cell: BareCell) -> None:
    """It gives the very bits that the same prefix gives while the device still has it."""
    client = TaskClient()
    async with client.connected(cell):
        await until_ready(client)
        cold = await one(client, "cold", prompt("a"))
        assert cold.cached_tokens == 0
        here = await one(client, "here", prompt("a"))
        full = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert here.cached_tokens == full
        for number in range(3):
            hits = await settled_total(cell, "host_hits", 0)
            await fill(client, f"fill-{number}")
            loaded = await one(client, f"loaded-{number}", prompt("a"))
            assert loaded.cached_tokens == full
            assert await total(cell, "host_hits", hits + 1) > hits
            assert loaded.tokens == here.tokens
            assert loaded.logprobs == here.logprobs


async def until_ready(client: TaskClient) -> None:
    """Wait until the ranks have registered the memory: a second load of a prompt then hits it."""
    for number in range(60):
        await one(client, f"ready-{number}", prompt("ready"))
        await fill(client, f"ready-fill-{number}")
        if (await one(client, f"again-{number}", prompt("ready"))).cached_tokens:
            return
        await asyncio.sleep(1)
    pytest.fail("the ranks use no host pages")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_pages_of_one_layout_are_read_in_each_other(cell: BareCell) -> None:
    client = TaskClient()
    full = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    async with client.connected(cell):
        for origin in ("dp2", "tp2", "sp2"):
            await asyncio.to_thread(cell.switch, origin, "recompute")
            name = f"from-{origin}"
            await one(client, name, prompt(name))
            for layout in ("tp2", "sp2", "dp2"):
                # `recompute` empties what ranks have cached.
                await asyncio.to_thread(
                    cell.switch, "dp2" if layout != "dp2" else "tp2", "recompute"
                )
                await asyncio.to_thread(cell.switch, layout, "recompute")
                found = await one(client, f"{name}-{layout}", prompt(name))
                assert found.cached_tokens == full, (origin, layout)
                here = await one(client, f"{name}-{layout}-here", prompt(name))
                assert (here.tokens, here.logprobs) == (found.tokens, found.logprobs)
        await asyncio.to_thread(cell.switch, f"dp{ranks()}", "recompute")


async def test_tasks_of_a_killed_rank_compute_no_full_block_again(cell: BareCell) -> None:
    client = TaskClient()
    async with client.connected(cell):
        names = [f"task-{number}" for number in range(STREAMS)]
        for name in names:
            client.submit(name, prompt(name, 200), max_tokens=400, ignore_eos=True)
        while min(len(client.streams[name].tokens) for name in names) < 40:
            await asyncio.sleep(0.002)
        hits = await settled_total(cell, "host_hits", 0)
        os.kill(pids_of(cell)[ranks() - 1], signal.SIGKILL)
        delivered: dict[str, int] = {}
        while not all(client.streams[name].finished for name in names):
            for name in names:
                if client.streams[name].resumed and name not in delivered:
                    delivered[name] = len(client.submitted(name).delivered_tokens)
            await asyncio.sleep(0.001)
        await client.finish(*names)
        assert delivered
        full = sum((200 + count - 1) // BLOCK_TOKENS * BLOCK_TOKENS for count in delivered.values())
        if ranks() > 1:
            # The memory of the lost rank has the same, and is closer.
            from_device = await total(cell, "lost_hits")
            wanted = hits + full - from_device
            assert await total(cell, "host_hits", wanted) >= wanted
        else:
            # The process that counted before is gone.
            assert await total(cell, "host_hits", full) >= full


async def test_a_renewed_cell_knows_the_prompts_of_the_former_one(cell: BareCell) -> None:
    client = TaskClient()
    async with client.connected(cell):
        before = await one(client, "before", prompt("renewed"))
        await asyncio.to_thread(renew, cell)
        await until_ready(client)
        after = await one(client, "after", prompt("renewed"))
    assert after.cached_tokens == (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert after.tokens == before.tokens


async def test_by_default_host_pages_take_a_tenth_of_the_memory(tmp_path: Path) -> None:
    with bare_cell(
        tmp_path,
        ranks=ranks(),
        engine_args=[*devices.CUDA_ENGINE, "--kv-cache-memory-bytes", str(KV_BYTES)],
        device="cuda",
        limits={"host_kv_gib": "auto"},
    ) as up:
        # Each rank registers all of it.
        wanted = int(0.95 * ranks() * AUTO_SHARE * memory_bytes())
        for _ in range(10):
            if await total(up, "host_registered_bytes", wanted) >= wanted:
                return
        pytest.fail(up.log("worker")[-2000:])

"""A rank is killed with its device's memory while 64 long streams run: none computes again.

Shapes of models that people serve, random weights, two GPUs: `python -m pytest -m gpu -s tests/gpu`
prints what is measured.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.gauges import settled_total, total
from tests.harness.cells.lost_ranks import (
    all_serve,
    begun,
    kill,
    pids_of,
    ranks_of,
    renew,
    tell_pauses,
    until,
)
from tests.harness.vllm.known_shapes import LLAMA_8B

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 2_000, 600
BLOCK_TOKENS = 16
HOST_GIB = 40.0
HOST_PAUSE_LIMIT_S, PAUSE_LIMIT_S = 1.2, 1.0
MEMORY_MARGIN_BYTES = 256 << 20
"""A process's context and what torch caches differ a little."""
ENGINE = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096"),
    *("--max-num-seqs", "128", "--kv-cache-memory-bytes", str(26 << 30)),
)


def write_model(folder: Path) -> Path:
    """Write the shape of a model of 8B."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    return model


def submit_all(client: TaskClient, tag: str) -> list[str]:
    names = [f"{tag}-{number}" for number in range(STREAMS)]
    for name in names:
        ids = random.Random(name).choices(range(10, 100_000), k=PROMPT_TOKENS)
        client.submit(name, ids, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return names


@contextmanager
def cell_of(folder: Path, model: Path, **limits: Any) -> Iterator[BareCell]:
    """Run two ranks that load dummy weights."""
    with bare_cell(
        folder, ranks=2, engine_args=list(ENGINE), model=model, device="cuda", limits=limits
    ) as cell:
        yield cell


async def kill_one(cell: BareCell, source: str, victim: int = 1) -> float:
    """Kill a rank in the middle of all streams; returns the longest pause, in seconds.

    The tasks that were submitted again take all their full blocks from this source.
    """
    client, survivor = TaskClient(), 1 - victim
    async with client.connected(cell):
        names = submit_all(client, "warm")
        await client.finish(*names)
        names = submit_all(client, "lost")
        await begun(client, names, 100)
        hits = await settled_total(cell, source, survivor)
        seen_s = await asyncio.to_thread(kill, cell, victim, pids_of(cell)[victim])
        print(f"known after {seen_s * 1e3:.0f} ms")
        streams = await client.finish(*names)
        assert all(len(stream.tokens) == ANSWER_TOKENS for stream in streams)
        moved = [name for name in names if client.streams[name].resumed]
        assert len(moved) >= STREAMS // 4
        counts = [len(client.submitted(name).delivered_tokens) for name in moved]
        full = sum((PROMPT_TOKENS + each - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in counts)
        found = await total(cell, source, hits + full) - hits
        print(f"{len(moved)} streams submitted again, {full} tokens in full blocks, {found} found")
        longest_s = tell_pauses("lost", streams)
        assert found >= full
    return longest_s


async def test_host_pages_have_what_a_lost_device_had(tmp_path: Path) -> None:
    with cell_of(tmp_path, write_model(tmp_path), host_kv_gib=HOST_GIB, peer_access="off") as cell:
        wanted = int(2 * 0.99 * HOST_GIB * 2**30)
        for _ in range(20):
            if await total(cell, "host_registered_bytes", wanted) >= wanted:
                break
        else:
            pytest.fail("the ranks register no host pages")
        assert await kill_one(cell, "host_hits") <= HOST_PAUSE_LIMIT_S


def in_use() -> list[int]:
    """Return the bytes in use on each device."""
    free = (torch.cuda.mem_get_info(device) for device in range(2))
    return [whole - left for left, whole in free]


def lost_for(cell: BareCell, victim: int, began_s: float) -> float:
    """Wait until a lost rank serves again; returns the seconds since then."""
    until(cell, "back", lambda _: ranks_of(cell)[victim]["available"])
    until(cell, "serving", all_serve)
    return time.monotonic() - began_s


async def test_tasks_go_on_from_the_memory_of_a_lost_device(tmp_path: Path) -> None:
    """Without host pages; then a member of a wide group is lost, too."""
    with cell_of(tmp_path, write_model(tmp_path)) as cell:
        before = in_use()
        pauses_s = {}
        for layout, victim in (("dp2", 1), ("tp2", 1), ("tp2", 0)):
            if layout != cell.get("/admin/layout")["layout"]:
                await asyncio.to_thread(renew, cell)
                await asyncio.to_thread(cell.switch, layout, "recompute")
            began_s = time.monotonic()
            pauses_s[layout, victim] = await kill_one(cell, "lost_hits", victim)
            back_s = await asyncio.to_thread(lost_for, cell, victim, began_s)
            print(f"{layout}, rank {victim}: serves again {back_s:.1f} s after the test began")
            after = in_use()
            print(f"in use before {before}, after {after}")
            assert all(
                now <= then + MEMORY_MARGIN_BYTES for then, now in zip(before, after, strict=True)
            )
    assert max(pauses_s.values()) <= PAUSE_LIMIT_S, pauses_s

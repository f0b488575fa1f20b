"""A rank is killed with its device's memory while 64 long streams run: none computes again.

Shapes of models that people serve, random weights, two GPUs: `python -m pytest -m gpu -s tests/gpu`
prints what is measured.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.device_losses import SHAPES, Load, Loss, cell_of, lose_one
from tests.harness.cells.gauges import gauges, settled_total, total
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import renew

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

HOST_GIB = 40.0
HOST_PAUSE_LIMIT_S, PAUSE_LIMIT_S = 1.2, 1.0
BACK_LIMIT_S = 10.0
SAME_SHARE = 0.9
"""Of first tokens in bf16 with random weights, whose logits are close to each other."""
MEMORY_MARGIN_BYTES = 512 << 20
"""What torch caches differs; a communicator of wide groups that stayed would be 0.9 GB."""
LOAD = Load()


async def lose(cell: BareCell, source: str, victim: int = 1) -> tuple[Loss, list[int]]:
    """Lose a rank after other streams; returns it and the first tokens of these.

    The survivor takes all full blocks from this source.
    """
    client = TaskClient()
    async with client.connected(cell):
        warm = [each.tokens[0] for each in await client.finish(*LOAD.submit(client, "warm"))]
        loss = await lose_one(cell, client, "lost", LOAD, source, victim)
    assert loss.found >= loss.full
    return loss, warm


async def test_host_pages_have_what_a_lost_device_had(tmp_path: Path) -> None:
    with cell_of(tmp_path, "8b", host_kv_gib=HOST_GIB, peer_access="off") as cell:
        wanted = int(2 * 0.99 * HOST_GIB * 2**30)
        for _ in range(20):
            if await total(cell, "host_registered_bytes", wanted) >= wanted:
                break
        else:
            pytest.fail("the ranks register no host pages")
        loss, _ = await lose(cell, "host_hits")
        assert max(loss.pauses_s) <= HOST_PAUSE_LIMIT_S


def in_use() -> list[int]:
    """Return the bytes in use on each device."""
    free = (torch.cuda.mem_get_info(device) for device in range(2))
    return [whole - left for left, whole in free]


async def check_inherited(cell: BareCell, victim: int, warm: list[int]) -> None:
    """A rank that is back computes no prompt again that the process before it has read.

    `warm` are the first tokens after these prompts, computed by the process before.
    """
    client = TaskClient()
    async with client.connected(cell):
        for number in range(LOAD.streams):
            client.submit(f"again-{number}", LOAD.prompt_of(f"warm-{number}"), max_tokens=1)
        again = [stream.tokens[0] for stream in await client.finish(*client.streams)]
        computed = await settled_total(cell, "computed_tokens", victim)
    (inherited,) = events_of(cell.log("worker"), "blocks_inherited")
    same = sum(now == then for now, then in zip(again, warm, strict=True))
    print(f"{inherited['blocks']} blocks inherited, {computed} tokens of prompts computed")
    print(f"{same} of {LOAD.streams} answers begin as before")
    assert same >= SAME_SHARE * LOAD.streams
    assert inherited["blocks"] > LOAD.streams // 4 * LOAD.prompt // LOAD.block
    assert 0 < computed < LOAD.streams * 2 * LOAD.block


@pytest.mark.parametrize("size", SHAPES)
async def test_tasks_go_on_from_the_memory_of_a_lost_device(tmp_path: Path, size: str) -> None:
    """Without host pages; then members of a wide group are lost, too. None loads weights again."""
    with cell_of(tmp_path, size) as cell:
        before = in_use()
        pauses_s: dict[tuple[str, int], float] = {}
        backs_s: dict[tuple[str, int], float] = {}
        for layout, victim in (("dp2", 1), ("tp2", 1), ("tp2", 0)):
            if pauses_s:
                await asyncio.to_thread(renew, cell)
                await asyncio.to_thread(cell.switch, layout, "recompute")
            loss, warm = await lose(cell, "lost_hits", victim)
            pauses_s[layout, victim] = max(loss.pauses_s)
            backs_s[layout, victim] = loss.back_s
            await settled_total(cell, "loaded_bytes", victim)
            loaded = [each["loaded_bytes"] for each in gauges(cell)]
            after = in_use()
            print(f"{layout}, rank {victim}: loaded {loaded}; in use {before}, after it {after}")
            assert loaded[victim] == 0 < loaded[1 - victim]
            if layout == "dp2":
                await check_inherited(cell, victim, warm)
            assert all(
                now <= then + MEMORY_MARGIN_BYTES for then, now in zip(before, after, strict=True)
            )
    assert max(pauses_s.values()) <= PAUSE_LIMIT_S, pauses_s
    assert max(backs_s.values()) <= BACK_LIMIT_S, backs_s

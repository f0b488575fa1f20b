"""A group is lost as a whole, and comes back on its own while the other one serves.

On GPUs its members are started again together, and have boards, memory and communicators with each
other alone. Needs four NVIDIA GPUs, or fewer and NCCL 2.30: `python -m pytest -m gpu tests/gpu`. On
CPU, where who comes back joins all others, `make chaos` runs the same.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import (
    TASKS,
    all_serve,
    back,
    begun,
    kill,
    pids_of,
    ranks_of,
    submit,
    tell_pauses,
    until,
)

pytestmark = [pytest.mark.timeout(400)]

CUDA_ENGINE = ["--max-model-len", "1024", "--max-num-seqs", "64"]
RANKS = 4
PAIRS = "tp2+tp2"
TOKENS = 700
PAUSE_LIMIT_S = 12.0
"""The other group takes over all streams, and ranks share one device or two cores."""
MOVE_LIMIT_S = 5.0
"""Ranks wait for 20 s for one that tells nothing."""


@contextmanager
def pairs(
    folder: Path, device: str, *, renew_busy_ms: int = 0, **limits: Any
) -> Iterator[BareCell]:
    """Four ranks, of which neighbours serve together."""
    engine, shared = devices.cell_on(device, RANKS, CUDA_ENGINE)
    limits |= {**shared, "widths": [1, 2], "layout": PAIRS}
    with bare_cell(
        folder,
        ranks=RANKS,
        engine_args=engine,
        device=device,
        limits=limits,
        renew_busy_ms=renew_busy_ms,
    ) as up:
        until(up, "serving in pairs", in_pairs)
        yield up


def in_pairs(cell: BareCell) -> bool:
    return all_serve(cell) and cell.get("/admin/layout")["layout"] == PAIRS


async def lose(cell: BareCell, *ranks: int) -> dict[int, bool]:
    """Kill these under load; all streams end whole. Returns which ranks are new when all serve."""
    before, client, tag = pids_of(cell), TaskClient(), f"ranks {ranks}"
    async with client.connected(cell):
        names = submit(client, tag, TOKENS)
        await begun(client, names)
        for rank in ranks:
            await asyncio.to_thread(kill, cell, rank, before[rank])
        streams = await client.finish(*names)
    assert [len(stream.tokens) for stream in streams] == [TOKENS] * TASKS
    assert tell_pauses(tag, streams) < PAUSE_LIMIT_S
    until(cell, "in pairs again", in_pairs)
    back(cell, tag)
    after = pids_of(cell)
    return {rank: after[rank] != before[rank] for rank in before}


async def move(cell: BareCell) -> None:
    """Streams cross switches in which all ranks take part, each among those that it can reach."""
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, "moved", TOKENS)
        await begun(client, names)
        for layout in ("dp4", PAIRS, "dp4", PAIRS):
            began_s = time.monotonic()
            record = (await asyncio.to_thread(cell.switch, layout, "reshard"))["switch"]
            took_s = time.monotonic() - began_s
            print(f"to {layout}: {took_s * 1e3:.0f} ms, {record['tasks']}")
            assert took_s < MOVE_LIMIT_S
            assert record["tasks"]["reshard"] > 0
            assert record["tasks"]["recompute"] == 0
        streams = await client.finish(*names)
    assert [len(stream.tokens) for stream in streams] == [TOKENS] * TASKS
    assert "move_failed" not in cell.log("worker")


async def serve_until_in_pairs(cell: BareCell, lost: int) -> list[Stream]:
    """Lose a rank, and keep the cell busy until the layout is as it was."""
    client, tag = TaskClient(), f"rank {lost} under load"
    streams: list[Stream] = []
    async with client.connected(cell):
        waves = [submit(client, f"{tag} 0", TOKENS)]
        await begun(client, waves[0])
        await asyncio.to_thread(kill, cell, lost, pids_of(cell)[lost])
        began_s, again_s = time.monotonic(), 0.0
        while waves:
            if not again_s and await asyncio.to_thread(in_pairs, cell):
                again_s = time.monotonic() - began_s
            elif not again_s:
                # The next ones begin in the middle of these: the cell has always something to do.
                waves.append(submit(client, f"{tag} {len(streams) + len(waves)}", TOKENS))
                await begun(client, waves[-1])
            streams += await client.finish(*waves.pop(0))
    print(f"{tag}: in pairs again {again_s:.1f} s after the loss was known")
    tell_pauses(tag, streams)
    return streams


@pytest.mark.parametrize("device", devices.BOTH)
def test_a_pair_whose_other_member_lives_comes_back_under_load(device: str, tmp_path: Path) -> None:
    """On GPUs a member that outlived the other has no communicators with the new one."""
    with pairs(tmp_path, device, renew_busy_ms=2_000) as cell:
        before = pids_of(cell)
        streams = asyncio.run(serve_until_in_pairs(cell, 1))
        assert {len(stream.tokens) for stream in streams} == {TOKENS}
        back(cell, "under load")
        after = pids_of(cell)
        is_new = {rank: after[rank] != before[rank] for rank in before}
        assert is_new == {0: device == "cuda", 1: True, 2: False, 3: False}
        asyncio.run(move(cell))


@pytest.mark.parametrize("device", devices.BOTH)
def test_a_pair_comes_back_together_and_all_move_tasks_again(device: str, tmp_path: Path) -> None:
    with pairs(tmp_path, device) as cell:
        is_new = asyncio.run(lose(cell, 0, 1))
        assert is_new == {0: True, 1: True, 2: False, 3: False}
        assert not any(rank["degraded"] for rank in ranks_of(cell))
        asyncio.run(move(cell))


@pytest.mark.parametrize("device", devices.BOTH)
def test_with_halves_of_the_weights_the_other_pair_serves_on(device: str, tmp_path: Path) -> None:
    with pairs(tmp_path, device, weight_parts=2, borrow="none") as cell:
        is_new = asyncio.run(lose(cell, 1))
        assert is_new == {0: device == "cuda", 1: True, 2: False, 3: False}

"""A step that finds no room on its GPU ends no process, alone and in the middle of a wide group.

The other members are let out of the collective that they wait in, as of one that is lost. On CPU
`make chaos` runs the same. Needs two NVIDIA GPUs, or one and NCCL 2.30, and vLLM's CUDA build.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.cells.lost_ranks import (
    all_serve,
    back,
    pids_of,
    ranks_of,
    renew,
    run_out_of_room,
    tell_pauses,
    until,
)
from tests.harness.faults.oom_worker import FOLDER, STEP

pytestmark = [pytest.mark.timeout(400)]

RANKS = 2
TOKENS = 700
PAUSE_LIMIT_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("no-room")


@pytest.fixture(
    scope="module",
    params=devices.BOTH,
)
def cell(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    engine, limits = devices.cell_on(request.param, RANKS, devices.CUDA_ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        with bare_cell(
            tmp_path_factory.mktemp("cell"),
            ranks=RANKS,
            engine_args=engine,
            device=request.param,
            limits=limits,
            worker="tests.harness.faults.oom_worker",
        ) as running:
            yield running


@pytest.mark.parametrize(("layout", "rank"), [("dp2", 0), ("tp2", 0), ("tp2", 1), ("sp2", 1)])
async def test_no_process_ends(cell: BareCell, folder: Path, layout: str, rank: int) -> None:
    if any(each["degraded"] for each in ranks_of(cell)):
        await asyncio.to_thread(renew, cell)
    await asyncio.to_thread(until, cell, "all there", all_serve)
    await asyncio.to_thread(cell.switch, layout, "recompute")
    before = pids_of(cell)
    wanted = folder / f"{STEP}-{rank}"
    streams = await run_out_of_room(cell, wanted, rank, layout, TOKENS)
    assert {len(stream.tokens) for stream in streams} == {TOKENS}
    assert tell_pauses(f"no room for a step of rank {rank} in {layout}", streams) < PAUSE_LIMIT_S
    assert pids_of(cell) == before, "a process ended"
    back(cell, layout)
    assert pids_of(cell) == before, "a process ended"
    told = cell.log("worker")
    assert "CUDA out of memory" in told
    assert "rank_stuck" not in told
    assert "unblock_failed" not in told

"""A step that finds no room on its GPU ends no process, alone and in the middle of a wide group.

The other members are let out of the collective that they wait in, as of one that is lost. On CPU
`make chaos` runs the same. Needs two NVIDIA GPUs, or one and NCCL 2.30, and vLLM's CUDA build.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import devices
from tests.harness.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.lost_ranks import (
    all_serve,
    back,
    begun,
    is_cut_out,
    ranks_of,
    renew,
    submit,
    tell_pauses,
    until,
)
from tests.harness.oom_worker import FOLDER, STEP

pytestmark = [pytest.mark.timeout(400)]

CUDA_ENGINE = ["--max-model-len", "1024", "--gpu-memory-utilization", "0.3", "--max-num-seqs", "64"]
RANKS = 2
TOKENS = 700
PAUSE_LIMIT_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("no-room")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.chaos),
    ],
)
def cell(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    engine, limits = devices.cell_on(request.param, RANKS, CUDA_ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        with bare_cell(
            tmp_path_factory.mktemp("cell"),
            ranks=RANKS,
            engine_args=engine,
            device=request.param,
            limits=limits,
            worker="tests.harness.oom_worker",
        ) as running:
            yield running


@pytest.mark.parametrize(("layout", "rank"), [("dp2", 0), ("tp2", 0), ("tp2", 1), ("sp2", 1)])
async def test_no_process_ends(cell: BareCell, folder: Path, layout: str, rank: int) -> None:
    if any(each["degraded"] for each in ranks_of(cell)):
        await asyncio.to_thread(renew, cell)
    await asyncio.to_thread(until, cell, "all there", all_serve)
    await asyncio.to_thread(cell.switch, layout, "recompute")
    before = pids_of(cell)
    streams = await run_out(cell, folder, layout, rank)
    assert {len(stream.tokens) for stream in streams} == {TOKENS}
    assert tell_pauses(f"no room for a step of rank {rank} in {layout}", streams) < PAUSE_LIMIT_S
    assert pids_of(cell) == before, "a process ended"
    back(cell, layout)
    assert pids_of(cell) == before, "a process ended"
    told = cell.log("worker")
    assert "CUDA out of memory" in told
    assert "rank_stuck" not in told
    assert "not_let_out" not in told


async def run_out(cell: BareCell, folder: Path, layout: str, rank: int) -> list[Stream]:
    """Let a step find no room under load; returns the streams when all are over."""
    client, wanted = TaskClient(), folder / f"{STEP}-{rank}"
    async with client.connected(cell):
        names = submit(client, f"{layout}-{rank}", TOKENS)
        await begun(client, names)
        wanted.touch()
        await asyncio.to_thread(until, cell, "left out", lambda _: is_cut_out(cell, rank))
        streams = await client.finish(*names)
    assert not wanted.exists(), "it did not run out of memory."
    return streams


def pids_of(cell: BareCell) -> list[int]:
    return [rank["pid"] for rank in ranks_of(cell)]

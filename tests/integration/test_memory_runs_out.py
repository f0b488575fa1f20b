"""Where the device's memory runs out, no process ends, and no stream notices.

A switch needs no memory of its own: weights, KV, communicators and graphs are there from the start,
and what steps need beside them is kept free. If a step finds no room all the same, all of its group
come out of it, its rank is left out for a while, and the tasks go on elsewhere. If copies of a move
find none, the move is given up, and its tasks are computed again.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.lost_ranks import (
    all_serve,
    back,
    begun,
    calm_tokens,
    ranks_of,
    run_out_of_room,
    submit,
    tell_pauses,
    tokens_of,
    until,
)
from tests.harness.faults.oom_worker import COPIES, FOLDER, STEP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAUSE_LIMIT_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oom")


@pytest.fixture(scope="module")
def cell(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        with bare_cell(
            tmp_path_factory.mktemp("cell"),
            ranks=2,
            engine_args=["--dtype", "float32", "--max-model-len", "1024"],
            worker="tests.harness.faults.oom_worker",
        ) as running:
            yield running


def processes(cell: BareCell) -> list[tuple[int, int]]:
    return [(rank["pid"], rank["incarnation"]) for rank in ranks_of(cell)]


@pytest.mark.parametrize(("layout", "rank"), [("tp2", 0), ("tp2", 1), ("dp2", 1)])
async def test_a_step_without_room_ends_no_process(
    cell: BareCell, folder: Path, layout: str, rank: int
) -> None:
    until(cell, "all there", all_serve)
    expected = await calm_tokens(cell)
    cell.switch(layout, "reshard")
    before, wanted = processes(cell), folder / f"{STEP}-{rank}"
    streams = await run_out_of_room(cell, wanted, rank, layout)
    assert tokens_of(streams) == expected
    what = f"no room for a step of rank {rank} in {layout}"
    assert tell_pauses(what, streams) < PAUSE_LIMIT_S
    back(cell, what)
    assert processes(cell) == before, "a process ended"
    assert "CUDA out of memory" in cell.log("worker")


async def test_a_move_without_room_is_given_up(cell: BareCell, folder: Path) -> None:
    until(cell, "all there", all_serve)
    expected = await calm_tokens(cell)
    cell.switch("tp2", "reshard")
    client, before, wanted = TaskClient(), processes(cell), folder / f"{COPIES}-1"
    async with client.connected(cell):
        names = submit(client, "move")
        await begun(client, names)
        wanted.touch()
        await asyncio.to_thread(cell.switch, "dp2", "reshard")
        assert not wanted.exists(), "nothing was copied."
        assert cell.get("/admin/layout")["layout"] == "dp2", "the switch is made all the same"
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    assert tell_pauses("no room for copies", streams) < PAUSE_LIMIT_S
    back(cell, "no room for copies")
    assert processes(cell) == before, "a process ended"
    assert "move_failed" in cell.log("worker")

"""Four ranks: every layout to every other, directly, under load and idle, with exact streams."""

import itertools
import time
from collections.abc import Iterator

import pytest

from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.cells.crossing import LAYOUTS, TASKS, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32; paused tasks are resumed elsewhere after a second."""
    with bare_cell(
        tmp_path_factory.mktemp("four"),
        ranks=4,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        pause_limit_ms=1_000,
    ) as running:
        yield running


@pytest.mark.timeout(400)
async def test_every_layout_to_every_other_with_exact_streams(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    expected = await run(cell, "plain", [])
    pairs = [layout for pair in itertools.permutations(LAYOUTS, 2) for layout in pair]
    carries = itertools.cycle(["recompute", "pause"])
    switches = [(layout, next(carries)) for layout in pairs]
    third = len(switches) // 3
    for turn in range(3):
        cell.switch("dp4", "recompute")
        part = switches[turn * third : (turn + 1) * third]
        assert await run(cell, f"switched-{turn}", part) == expected, turn
    records = cell.get("/admin/switches?last=60")["switches"]
    met = sum(sum(record["tasks"].values()) for record in records)
    assert met > TASKS, "the switches met no running tasks"


@pytest.mark.timeout(120)
async def test_a_paused_task_is_resumed_elsewhere_after_the_limit(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    expected = await run(cell, "unpaused", [])
    started = time.monotonic()
    assert await run(cell, "paused", [("tp4", "pause")]) == expected
    assert time.monotonic() - started > 1.0, "the tasks waited for the pause limit"
    record = cell.record("dp4", "tp4")
    assert record["tasks"]["pause"] == TASKS
    assert cell.get("/admin/layout")["layout"] == "tp4"


@pytest.mark.timeout(120)
async def test_drain_lets_tasks_finish_first(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    expected = await run(cell, "undrained", [])
    assert await run(cell, "drained", [("tp2+tp2", "drain")]) == expected
    record = cell.record("dp4", "tp2+tp2")
    assert record["tasks"]["recompute"] == record["tasks"]["pause"] == 0


def test_unaffected_groups_keep_serving_through_a_switch(cell: BareCell) -> None:
    cell.switch("tp2+dp2", "recompute")
    born = {tuple(g["ranks"]): g["born"] for g in cell.get("/admin/layout")["groups"]}
    cell.switch("tp2+tp2", "recompute")
    after = {tuple(g["ranks"]): g["born"] for g in cell.get("/admin/layout")["groups"]}
    assert after[0, 1] == born[0, 1]
    assert after[2, 3] > born[2,]


def test_idle_switches_come_back_to_the_same_pages(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    before = [rank["pages"] for rank in cell.get("/admin/ranks")["ranks"]]
    for layout in LAYOUTS * 4:
        assert cell.switch(layout, "pause")["layout"] == layout
    cell.switch("dp4", "pause")
    assert [rank["pages"] for rank in cell.get("/admin/ranks")["ranks"]] == before
    for rank in cell.get("/admin/ranks")["ranks"]:
        pages = rank["pages"]
        assert pages["free"] + pages["owned"] + pages["leased"] + 1 == pages["total"]
        assert rank["gauges"]["process_groups"] == rank["gauges"]["process_groups_at_start"]

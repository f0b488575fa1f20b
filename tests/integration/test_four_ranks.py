"""Four ranks: what plans promise to tasks and groups, with exact streams, and idle switches."""

import time

import pytest

from tests.harness.cells.bare_cell import BareCell
from tests.harness.cells.crossing import LAYOUTS, TASKS, Calm, run
from tests.harness.cells.random_load import settle
from tests.harness.cells.shared import PAUSE_LIMIT_MS

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-four")]


@pytest.fixture(scope="module")
def calm() -> Calm:
    """What becomes of the tasks without a switch."""
    return Calm()


@pytest.mark.timeout(400)
async def test_a_paused_task_is_resumed_elsewhere_after_the_limit(
    four_ranks: BareCell, calm: Calm
) -> None:
    expected = await calm.tokens(four_ranks)
    started = time.monotonic()
    assert await run(four_ranks, "paused", [("tp4", "pause")]) == expected
    assert time.monotonic() - started > PAUSE_LIMIT_MS / 1000, (
        "the tasks waited for the pause limit"
    )
    record = four_ranks.record("dp4", "tp4")
    assert record["tasks"]["pause"] == TASKS
    assert four_ranks.get("/admin/layout")["layout"] == "tp4"


@pytest.mark.timeout(400)
async def test_drain_lets_tasks_finish_first(four_ranks: BareCell, calm: Calm) -> None:
    expected = await calm.tokens(four_ranks)
    assert await run(four_ranks, "drained", [("tp2+tp2", "drain")]) == expected
    record = four_ranks.record("dp4", "tp2+tp2")
    assert record["tasks"]["recompute"] == record["tasks"]["pause"] == 0


def test_unaffected_groups_keep_serving_through_a_switch(four_ranks: BareCell) -> None:
    four_ranks.switch("tp2+dp2", "recompute")
    formation = {
        tuple(g["ranks"]): g["formation"] for g in four_ranks.get("/admin/layout")["groups"]
    }
    four_ranks.switch("tp2+tp2", "recompute")
    after = {tuple(g["ranks"]): g["formation"] for g in four_ranks.get("/admin/layout")["groups"]}
    assert after[0, 1] == formation[0, 1]
    assert after[2, 3] > formation[2,]


@pytest.mark.timeout(400)
async def test_a_few_pages_of_paused_tasks_wait_for_the_next_switch(
    four_ranks: BareCell, calm: Calm
) -> None:
    expected, before = await calm.tokens(four_ranks), settle(four_ranks)
    four_ranks.switch("tp2+dp2", "recompute")
    switches = [("tp4", "pause"), ("dp4", "recompute")]
    assert await run(four_ranks, "few", switches) == expected
    assert any(pages["free"] for pages in four_ranks.pages()), "the groups got all pages"
    formations = [group["formation"] for group in four_ranks.get("/admin/layout")["groups"]]
    four_ranks.switch("dp4", "recompute")
    groups = four_ranks.get("/admin/layout")["groups"]
    assert [group["formation"] for group in groups] == formations, "formed anew for a few pages"
    assert settle(four_ranks) == before


def test_idle_switches_come_back_to_the_same_pages(four_ranks: BareCell) -> None:
    before = [rank["pages"] for rank in four_ranks.get("/admin/ranks")["ranks"]]
    for layout in LAYOUTS * 4:
        assert four_ranks.switch(layout, "pause")["layout"] == layout
    four_ranks.switch("dp4", "pause")
    assert [rank["pages"] for rank in four_ranks.get("/admin/ranks")["ranks"]] == before
    for rank in four_ranks.get("/admin/ranks")["ranks"]:
        pages = rank["pages"]
        assert pages["free"] + pages["owned"] + pages["leased"] + 1 == pages["total"]
        assert rank["gauges"]["process_groups"] == rank["gauges"]["process_groups_at_start"]

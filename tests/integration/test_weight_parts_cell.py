"""A cell whose ranks hold halves of the weights: modes, refusals, and ranks that are killed."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, TaskClient
from tests.harness.cells.lost_ranks import (
    back,
    begun,
    calm_tokens,
    four_ranks,
    kill,
    pids_of,
    submit,
    tell_pauses,
    tokens_of,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks with a half of the weights each."""
    parted = {"weight_parts": 2, "borrow": "none", "layout": "shift2tp2"}
    with four_ranks(tmp_path_factory.mktemp("parts"), limits=parted) as up:
        yield up


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    """What the tasks generate undisturbed."""
    return asyncio.run(calm_tokens(cell))


async def test_streams_go_on_exactly_from_mode_to_mode(
    cell: BareCell, expected: list[list[int]]
) -> None:
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, "switched")
        layouts = ("tp4", "sp2tp2", "tp4", "shift2tp2", "sp2tp2", "shift2tp2")
        for count, layout in enumerate(layouts, 1):
            # Soon: the streams also run on while a switch begins.
            await begun(client, names, 8 * count)
            await asyncio.to_thread(cell.switch, layout, "reshard")
        assert tokens_of(await client.finish(*names)) == expected
    records = cell.get("/admin/switches?last=6")["switches"]
    assert sum(record["tasks"]["recompute"] for record in records) == 0


def test_it_is_explained_what_each_step_is_computed_in(cell: BareCell) -> None:
    times = cell.get("/admin/decisions?last=1")["step_times"]
    assert [(each["width"], sorted(each["curves"])) for each in times] == [(4, ["sp2tp2", "tp"])]


@pytest.mark.parametrize("layout", ["dp4", "tp2+tp2", "sp4", "dp2+tp2"])
def test_groups_that_do_not_have_all_parts_are_refused(cell: BareCell, layout: str) -> None:
    status, answer = post(cell.admin + "/admin/layout", {"layout": layout})
    assert status >= 400
    assert "parts of the weights" in str(answer) or "--mixed" in str(answer), answer


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.chaos), 3])
async def test_a_group_that_has_lost_a_member_waits_for_it(
    cell: BareCell, expected: list[list[int]], rank: int
) -> None:
    """Nobody else can serve: its streams go on when it is back, and the others live on."""
    before, client = pids_of(cell), TaskClient()
    async with client.connected(cell):
        names = submit(client, f"without-{rank}")
        await begun(client, names)
        await asyncio.to_thread(kill, cell, rank, before[rank])
        streams = await client.finish(*names)
    tell_pauses(f"rank {rank} of four halves", streams)
    assert tokens_of(streams) == expected
    back(cell, f"rank {rank}")
    after = pids_of(cell)
    assert {each for each in after if after[each] != before[each]} == {rank}
    cell.switch("shift2tp2", "reshard")

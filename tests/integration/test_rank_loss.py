"""SIGKILL of ranks under load: every stream goes on exactly, and the rank comes back.

Four ranks. Whatever is killed, in whatever layout: its tasks continue elsewhere from what was
delivered, all others serve on as the processes that they are, also those that were in the middle of
a collective with it, and it is started again. Times are printed; docs/faults.md has them.
"""

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.lost_ranks import (
    back,
    begun,
    calm_tokens,
    four_ranks,
    kill,
    pids_of,
    ranks_of,
    renew,
    submit,
    tell_pauses,
    tokens_of,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


PAUSE_LIMIT_S = 12.0
"""The target is 3 s, which a machine with other work to do may miss. A group that is stuck in a
collective and has to be started again takes longer than this on any."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    with four_ranks(tmp_path_factory.mktemp("loss")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    return asyncio.run(calm_tokens(cell))


@pytest.fixture
def whole(cell: BareCell) -> BareCell:
    """The cell, which can form groups of all widths whatever an earlier test has done to it."""
    assert not any(rank["degraded"] for rank in ranks_of(cell))
    return cell


async def streams_through_loss(
    cell: BareCell, tag: str, rank: int, switch_to: str | None = None
) -> list[Stream]:
    """Kill a rank in the middle of all streams (and of a switch); returns them at their end."""
    client, before = TaskClient(), pids_of(cell)
    async with client.connected(cell):
        names = submit(client, tag)
        await begun(client, names)
        if switch_to is not None:
            await asyncio.to_thread(cell.ask, switch_to, "reshard")
        seen_s = await asyncio.to_thread(kill, cell, rank, before[rank])
        streams = await client.finish(*names)
    print(f"{tag}: exit seen after {seen_s * 1e3:.0f} ms")
    pause_s = tell_pauses(tag, streams)
    assert pause_s < PAUSE_LIMIT_S
    after = pids_of(cell)
    assert {each for each in after if after[each] != before[each]} <= {rank}, "others live on"
    return streams


async def test_no_stream_notices_that_ranks_die(whole: BareCell, expected: list[list[int]]) -> None:
    """In a group (a follower, in the middle of steps), in a switch (a leader), and in dp."""
    cell = whole
    cell.switch("tp2+tp2", "reshard")
    born = cell.get("/admin/layout")["groups"][1]["born"]
    streams = await streams_through_loss(cell, "follower in tp2", 1)
    assert tokens_of(streams) == expected
    back(cell, "follower in tp2")
    group = cell.get("/admin/layout")["groups"][-1]
    assert (group["ranks"], group["born"]) == ([2, 3], born), "the other group served on"

    cell.switch("dp4", "reshard")
    streams = await streams_through_loss(cell, "leader in a switch", 2, "dp2+tp2")
    assert tokens_of(streams) == expected
    back(cell, "leader in a switch")

    cell.switch("dp4", "reshard")
    streams = await streams_through_loss(cell, "rank in dp", 0)
    assert tokens_of(streams) == expected
    assert any(stream.resumed for stream in streams)
    back(cell, "rank in dp")
    assert ranks_of(cell)[0]["restarts"] >= 1
    cell.switch("tp4", "reshard")


async def test_members_of_wide_groups_outlive_each_other(
    whole: BareCell, expected: list[list[int]]
) -> None:
    """Where all ranks are started again, tasks wait."""
    client = TaskClient()
    async with client.connected(whole):
        names = submit(client, "renewed")
        await begun(client, names)
        await asyncio.to_thread(renew, whole)
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    back(whole, "all")
    whole.switch("tp4", "reshard")
    streams = await streams_through_loss(whole, "follower in tp4", 3)
    assert tokens_of(streams) == expected
    back(whole, "follower in tp4")
    whole.switch("tp2+dp2", "reshard")
    streams = await streams_through_loss(whole, "leader in tp2", 0)
    assert tokens_of(streams) == expected
    back(whole, "leader in tp2")


async def test_ranks_of_one_group_start_again_while_the_others_serve(
    whole: BareCell, expected: list[list[int]]
) -> None:
    whole.switch("tp2+tp2", "reshard")
    born = whole.get("/admin/layout")["groups"][1]["born"]
    before, client = pids_of(whole), TaskClient()
    async with client.connected(whole):
        names = submit(client, "one group renewed")
        await begun(client, names)
        status, answer = await asyncio.to_thread(
            post, whole.admin + "/admin/renew", {"ranks": [0, 1]}
        )
        assert status == 200, answer
        streams = await client.finish(*names)
    assert tell_pauses("one group renewed", streams) < PAUSE_LIMIT_S
    assert tokens_of(streams) == expected

    def is_as_before(_: BareCell) -> bool:
        view, pids = whole.get("/admin/layout"), pids_of(whole)
        are_new = all(pids[rank] != before[rank] for rank in (0, 1))
        return are_new and view["serving"] and view["layout"] == "tp2+tp2"

    until(whole, "as before", is_as_before)
    back(whole, "one group renewed")
    groups = whole.get("/admin/layout")["groups"]
    assert groups[1]["born"] == born, "the other group served on"
    assert [pids_of(whole)[rank] == before[rank] for rank in (2, 3)] == [True, True]
    assert "rank_killed" not in whole.log("worker")

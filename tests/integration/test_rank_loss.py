"""Ranks of one cell are killed in turn under load: every stream goes on exactly, and all come back.

Four ranks. Whatever is killed, in whatever layout: its tasks continue elsewhere from what was
delivered, all others serve on as the processes that they are, also those that were in the middle of
a collective with it, and it is started again. So it is with a rank that has no room for a step, but
no process ends. Times are printed; docs/faults.md has them.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.lost_ranks import (
    all_serve,
    back,
    begun,
    calm_tokens,
    four_ranks,
    kill,
    pids_of,
    ranks_of,
    renew,
    run_out_of_room,
    serves,
    streams_while,
    submit,
    tell_pauses,
    tokens_of,
    until,
)
from tests.harness.faults.faulty_worker import HELD, HOLD
from tests.harness.faults.oom_worker import COPIES, FOLDER, STEP

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(500)]

HAS_LOST_STEP = "deferred_step_lost", "step_aborted"
"""What a rank logs of a step that lost a member: after it has left the group, and before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files say what is to go wrong."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def cell(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    worker = "tests.harness.faults.faulty_worker"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        with four_ranks(tmp_path_factory.mktemp("loss"), worker=worker) as running:
            yield running


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    return asyncio.run(calm_tokens(cell))


@pytest.fixture
def whole(cell: BareCell) -> BareCell:
    """The cell, which can form groups of all widths whatever an earlier test has done to it."""
    until(cell, "all there", all_serve)
    assert not any(rank["degraded"] for rank in ranks_of(cell))
    return cell


def see_pauses(cell: BareCell, tag: str, streams: list[Stream]) -> None:
    """Nobody waited until who is stuck in a collective was ended for that."""
    assert tell_pauses(tag, streams) < cell.config.cell.step_limit_ms / 2e3
    assert "rank_stuck" not in cell.log("worker")


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
    see_pauses(cell, tag, streams)
    after = pids_of(cell)
    assert {each for each in after if after[each] != before[each]} <= {rank}, "others live on"
    return streams


async def test_no_stream_notices_that_ranks_die(whole: BareCell, expected: list[list[int]]) -> None:
    """In a group (a follower, in the middle of steps), in a switch (a leader), and in dp."""
    cell = whole
    cell.switch("tp2+tp2", "reshard")
    formation = cell.get("/admin/layout")["groups"][1]["formation"]
    streams = await streams_through_loss(cell, "follower in tp2", 1)
    assert tokens_of(streams) == expected
    back(cell, "follower in tp2")
    group = cell.get("/admin/layout")["groups"][-1]
    assert (group["ranks"], group["formation"]) == ([2, 3], formation), "the other group served on"

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


def events_of(cell: BareCell, name: str) -> list[dict[str, Any]]:
    """Return what ranks have logged of an event."""
    # Two ranks may log on one line.
    lines = re.findall(rf'\{{[^{{}}]*"{name}"[^{{}}]*\}}', cell.log("worker"))
    return list(map(json.loads, lines))


def probes_since_start(cell: BareCell) -> list[dict[str, Any]]:
    return [each for each in events_of(cell, "mode_probed") if each["epoch"] > 0]


def steps_lost(cell: BareCell) -> int:
    return sum(len(events_of(cell, name)) for name in HAS_LOST_STEP)


async def test_a_wide_group_is_formed_again_while_its_streams_run(
    whole: BareCell, expected: list[list[int]]
) -> None:
    """With the process that takes the lost one's place: nobody waits until there is nothing to do.

    `test_whole_again` loses leaders too, in groups of two widths, and who comes back once more.
    """
    whole.switch("tp4", "reshard")
    before, probes = pids_of(whole), len(probes_since_start(whole))
    took_s: list[float] = []

    async def lose() -> None:
        seen_s = await asyncio.to_thread(kill, whole, 3, before[3])
        again_s = await asyncio.to_thread(until, whole, "tp4 again", serves("tp4"))
        took_s.append(seen_s + again_s)

    streams = await streams_while(whole, "follower in tp4", lose)
    pause_s = tell_pauses("follower in tp4", streams)
    print(f"tp4 serves again {took_s[0]:.1f} s after the kill")
    assert pause_s < took_s[0], "streams waited for the lost rank"
    after = pids_of(whole)
    assert [rank for rank in after if after[rank] != before[rank]] == [3]
    back(whole, "follower in tp4")
    assert tokens_of(streams) == expected * (len(streams) // len(expected))
    later = probes_since_start(whole)[probes:]
    assert [each["mode"] for each in later] == ["tp4"], "the new group has proved itself"
    assert "ranks_renewed" not in whole.log("worker")


@pytest.mark.parametrize(
    ("origin", "wanted", "rank", "lose_it"),
    [
        ("tp4", "dp4", 2, 3),
        pytest.param("tp4", "dp4", 0, 3, marks=pytest.mark.chaos),
        pytest.param("tp2+tp2", "tp4", 1, 1, marks=pytest.mark.chaos),
        pytest.param("dp2+tp2", "tp2+tp2", 1, 0, marks=pytest.mark.chaos),
    ],
)
async def test_a_rank_dies_while_its_last_step_in_a_group_is_held(
    whole: BareCell,
    folder: Path,
    expected: list[list[int]],
    origin: str,
    wanted: str,
    rank: int,
    lose_it: int,
) -> None:
    """`lose_it` others held the step with the rank that is killed.

    A follower that is late has not left the group when it gives the step up.
    """
    whole.switch(origin, "reshard")
    count, before, client = steps_lost(whole), pids_of(whole), TaskClient()
    groups = [each["ranks"] for each in whole.get("/admin/layout")["groups"]]
    (members,) = [each for each in groups if rank in each]
    holding = [folder / f"{HELD}-{before[each]}" for each in members]
    tag = f"rank {rank} killed from {origin} to {wanted} with its step held"
    async with client.connected(whole):
        names = submit(client, tag)
        await begun(client, names)
        (folder / HOLD).touch()
        await asyncio.to_thread(whole.ask, wanted, "reshard")
        all_hold = lambda _: all(each.exists() for each in holding)  # noqa: E731
        try:
            await asyncio.to_thread(until, whole, "held", all_hold)
            await asyncio.to_thread(kill, whole, rank, before[rank])
        finally:
            (folder / HOLD).unlink()
        streams = await client.finish(*names)
    see_pauses(whole, tag, streams)
    assert tokens_of(streams) == expected
    after = pids_of(whole)
    assert {each for each in after if after[each] != before[each]} <= {rank}, "others live on"
    back(whole, tag)
    assert steps_lost(whole) - count == lose_it


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("tp2+tp2", 1),
        pytest.param("tp2+tp2", 0, marks=pytest.mark.chaos),
        pytest.param("dp4", 1, marks=pytest.mark.chaos),
    ],
)
async def test_a_step_without_room_ends_no_process(
    whole: BareCell, folder: Path, expected: list[list[int]], layout: str, rank: int
) -> None:
    """All of its group come out of it, its rank is left out, and the tasks go on elsewhere."""
    whole.switch(layout, "reshard")
    before, wanted = pids_of(whole), folder / f"{STEP}-{rank}"
    streams = await run_out_of_room(whole, wanted, rank, layout)
    assert tokens_of(streams) == expected
    what = f"no room for a step of rank {rank} in {layout}"
    see_pauses(whole, what, streams)
    back(whole, what)
    assert pids_of(whole) == before, "a process ended"
    assert "CUDA out of memory" in whole.log("worker")


async def test_a_move_without_room_is_given_up(
    whole: BareCell, folder: Path, expected: list[list[int]]
) -> None:
    """A switch needs no memory of its own; if copies find none, tasks are computed again."""
    whole.switch("tp2+tp2", "reshard")
    client, before, wanted = TaskClient(), pids_of(whole), folder / f"{COPIES}-1"
    async with client.connected(whole):
        names = submit(client, "move")
        await begun(client, names)
        wanted.touch()
        await asyncio.to_thread(whole.switch, "dp4", "reshard")
        assert not wanted.exists(), "nothing was copied."
        assert whole.get("/admin/layout")["layout"] == "dp4", "the switch is made all the same"
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    see_pauses(whole, "no room for copies", streams)
    back(whole, "no room for copies")
    assert pids_of(whole) == before, "a process ended"
    assert "move_failed" in whole.log("worker")


async def test_ranks_of_one_group_start_again_while_the_others_serve(
    whole: BareCell, expected: list[list[int]]
) -> None:
    whole.switch("tp2+tp2", "reshard")
    formation = whole.get("/admin/layout")["groups"][1]["formation"]
    before, client = pids_of(whole), TaskClient()
    async with client.connected(whole):
        names = submit(client, "one group renewed")
        await begun(client, names)
        status, answer = await asyncio.to_thread(
            post, whole.admin + "/admin/renew", {"ranks": [0, 1]}
        )
        assert status == 200, answer
        streams = await client.finish(*names)
    see_pauses(whole, "one group renewed", streams)
    assert tokens_of(streams) == expected

    def is_as_before(_: BareCell) -> bool:
        view, pids = whole.get("/admin/layout"), pids_of(whole)
        are_new = all(pids[rank] != before[rank] for rank in (0, 1))
        return are_new and view["serving"] and view["layout"] == "tp2+tp2"

    until(whole, "as before", is_as_before)
    back(whole, "one group renewed")
    groups = whole.get("/admin/layout")["groups"]
    assert groups[1]["formation"] == formation, "the other group served on"
    assert [pids_of(whole)[rank] == before[rank] for rank in (2, 3)] == [True, True]
    assert "rank_killed" not in whole.log("worker")


@pytest.mark.chaos
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


async def test_ranks_end_with_their_launcher_and_go_on_with_another(
    whole: BareCell, expected: list[list[int]]
) -> None:
    """Nobody serves meanwhile: tasks wait. `aileron up` ends with its launcher; pods start anew."""
    client, before = TaskClient(), pids_of(whole)
    async with client.connected(whole):
        names = submit(client, "launcher killed")
        await begun(client, names)
        whole.processes["worker"].kill()
        whole.processes["worker"].wait()
        ends = lambda _: not any(Path(f"/proc/{pid}").exists() for pid in before.values())  # noqa: E731
        await asyncio.to_thread(until, whole, "ended", ends)
        whole.start("worker")
        streams = await client.finish(*names)
    tell_pauses("launcher killed", streams)
    assert tokens_of(streams) == expected
    back(whole, "launcher killed")
    assert not set(before.values()) & set(pids_of(whole).values())

"""A wide group that has lost a member is formed again with the process that takes its place.

All others live on, with the streams that they serve: nobody waits until the cell has nothing to do.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.lost_ranks import (
    STARTED,
    back,
    begun,
    four_ranks,
    kill,
    ranks_of,
    submit,
    tell_pauses,
    tokens_of,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS = 900
"""Streams last until the group is formed again, and beyond."""

PAUSE_LIMIT_S = 3.0

Cell = Callable[[Path], AbstractContextManager[BareCell]]


def two_ranks(folder: Path) -> AbstractContextManager[BareCell]:
    arguments = ["--dtype", "float32", "--max-model-len", "1024"]
    return bare_cell(folder, ranks=2, engine_args=arguments)


@pytest.fixture(
    scope="module", params=[(two_ranks, "tp2"), (four_ranks, "tp4")], ids=["tp2", "tp4"]
)
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BareCell, str]]:
    make: Cell
    make, layout = request.param
    with make(tmp_path_factory.mktemp("whole")) as running:
        yield running, layout


def processes(cell: BareCell) -> list[int]:
    return [int(rank["pid"]) for rank in ranks_of(cell)]


def serves(cell: BareCell, layout: str) -> bool:
    view: dict[str, Any] = cell.get("/admin/layout")
    return bool(view["serving"]) and view["layout"] == layout


def probed_later(cell: BareCell) -> list[dict[str, Any]]:
    """The probes behind the start."""
    lines = [line for line in cell.log("worker").splitlines() if '"mode_probed"' in line]
    return [each for each in map(json.loads, lines) if each["epoch"] > 0]


async def test_a_group_is_formed_again_while_its_streams_run(named: tuple[BareCell, str]) -> None:
    cell, layout = named
    client = TaskClient()
    async with client.connected(cell):
        expected = tokens_of(await client.finish(*submit(client, "calm", TOKENS)))
    cell.switch(layout, "reshard")
    for rank, which in ((1, "follower"), (0, "leader")):
        before = processes(cell)
        client = TaskClient()
        async with client.connected(cell):
            names = submit(client, which, TOKENS)
            await begun(client, names)
            await asyncio.to_thread(kill, cell, rank, before[rank])
            again_s = await asyncio.to_thread(
                until, cell, f"{layout} again", lambda cell: serves(cell, layout)
            )
            open_then = sum(not client.streams[name].finished for name in names)
            streams = await client.finish(*names)
        tag = f"{which} of {layout}"
        print(f"{tag}: {layout} serves again {again_s:.1f} s after the loss was known")
        pause_s = tell_pauses(tag, streams)
        assert tokens_of(streams) == expected
        assert open_then == len(names), "streams ended before the group was formed again"
        assert pause_s < PAUSE_LIMIT_S
        changed = [a != b for a, b in zip(before, processes(cell), strict=True)]
        assert [number for number, is_new in enumerate(changed) if is_new] == [rank]
        back(cell, tag)
    assert len(probed_later(cell)) == 2, "each new group has shown that it computes the same"
    assert all(each["mode"] == layout for each in probed_later(cell))
    assert not any(rank["degraded"] for rank in ranks_of(cell))
    assert "ranks_renewed" not in cell.log("worker")


async def test_who_ends_again_on_its_way_back_holds_nobody_up(named: tuple[BareCell, str]) -> None:
    """First while it builds, then in the switch to the wide layout."""
    cell, layout = named
    client = TaskClient()
    async with client.connected(cell):
        expected = tokens_of(await client.finish(*submit(client, "calm", TOKENS)))
    until(cell, layout, lambda cell: serves(cell, layout))
    before, starts = processes(cell), len(started(cell))
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, "on its way", TOKENS)
        await begun(client, names)
        await asyncio.to_thread(kill, cell, 1, before[1])
        await asyncio.to_thread(until, cell, "started", lambda cell: len(started(cell)) > starts)
        os.kill(started(cell)[-1], signal.SIGKILL)
        await asyncio.to_thread(until, cell, "wanted again", lambda cell: is_wanted(cell, layout))
        pid = processes(cell)[1]
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(until, cell, f"{layout} again", lambda cell: serves(cell, layout))
        streams = await client.finish(*names)
    pause_s = tell_pauses(f"{layout}, lost three times", streams)
    assert tokens_of(streams) == expected
    assert pause_s < PAUSE_LIMIT_S
    assert len(started(cell)) == starts + 3
    after = processes(cell)
    assert (after[0], after[2:]) == (before[0], before[2:])
    back(cell, layout)


def started(cell: BareCell) -> list[int]:
    """The processes of rank 1 that were started so far."""
    lines = [line for line in cell.log("worker").splitlines() if STARTED in line]
    return [int(each["pid"]) for each in map(json.loads, lines) if each["rank"] == 1]


def is_wanted(cell: BareCell, layout: str) -> bool:
    """The switch to the layout is under way, or over."""
    return bool(cell.get("/admin/layout")["target"] == layout)

"""A wide group that has lost a member is formed again with the process that takes its place.

All others live on, with the streams that they serve: nobody waits until the cell has nothing to do.
Leaders and followers, of groups of two widths; `test_rank_loss` has one of these in `make test`.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import (
    HASTY,
    SOON,
    back,
    calm_tokens,
    four_ranks,
    kill,
    ranks_of,
    serves,
    streams_while,
    tell_pauses,
    tokens_of,
    until,
)

pytestmark = [pytest.mark.ranks, pytest.mark.chaos, pytest.mark.timeout(400)]

PAUSE_LIMIT_S = 3.0

Cell = Callable[[Path], AbstractContextManager[BareCell]]


def two_ranks(folder: Path) -> AbstractContextManager[BareCell]:
    arguments = ["--dtype", "float32", "--max-model-len", "1024"]
    return bare_cell(folder, ranks=2, engine_args=arguments, limits=SOON, **HASTY)


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


def is_wanted(layout: str) -> Callable[[BareCell], bool]:
    """The switch to the layout is under way, or over."""
    return lambda cell: bool(cell.get("/admin/layout")["target"] == layout)


def probed_later(cell: BareCell) -> list[dict[str, Any]]:
    """The probes behind the start."""
    # Two ranks may log on one line.
    told = re.findall(r'\{[^{}]*"mode_probed"[^{}]*\}', cell.log("worker"))
    return [each for each in map(json.loads, told) if each["epoch"] > 0]


def started(cell: BareCell) -> list[int]:
    """The processes of rank 1 that were started so far."""
    events = events_of(cell.log("worker"), "rank_started")
    return [int(each["pid"]) for each in events if each["rank"] == 1]


async def streams_through(
    cell: BareCell, tag: str, lose: Callable[[], Awaitable[None]]
) -> list[Stream]:
    streams = await streams_while(cell, tag, lose)
    assert tell_pauses(tag, streams) < PAUSE_LIMIT_S
    return streams


async def exact(cell: BareCell, streams: list[Stream]) -> bool:
    """Whether all are as they are when nothing goes wrong; asked when nothing does."""
    calm = await calm_tokens(cell)
    return tokens_of(streams) == calm * (len(streams) // len(calm))


async def test_a_group_is_formed_again_while_its_streams_run(named: tuple[BareCell, str]) -> None:
    cell, layout = named
    cell.switch(layout, "reshard")
    probes = len(probed_later(cell))
    for rank, which in ((1, "follower"), (0, "leader")):
        before, tag = processes(cell), f"{which} of {layout}"

        async def lose(rank: int = rank, before: list[int] = before, tag: str = tag) -> None:
            await asyncio.to_thread(kill, cell, rank, before[rank])
            again_s = await asyncio.to_thread(until, cell, f"{layout} again", serves(layout))
            print(f"{tag}: {layout} serves again {again_s:.1f} s after the loss was known")

        streams = await streams_through(cell, tag, lose)
        changed = [a != b for a, b in zip(before, processes(cell), strict=True)]
        assert [number for number, is_new in enumerate(changed) if is_new] == [rank]
        back(cell, tag)
        assert await exact(cell, streams)
    later = probed_later(cell)[probes:]
    assert [each["mode"] for each in later] == [layout] * 2, "each new group has proved itself"
    assert not any(rank["degraded"] for rank in ranks_of(cell))
    assert "ranks_renewed" not in cell.log("worker")


async def test_who_ends_again_on_its_way_back_holds_nobody_up(named: tuple[BareCell, str]) -> None:
    """First while it builds, then in the switch to the wide layout."""
    cell, layout = named
    cell.switch(layout, "reshard")
    before, starts = processes(cell), len(started(cell))

    async def lose() -> None:
        await asyncio.to_thread(kill, cell, 1, before[1])
        await asyncio.to_thread(until, cell, "started", lambda cell: len(started(cell)) > starts)
        os.kill(started(cell)[-1], signal.SIGKILL)
        await asyncio.to_thread(until, cell, f"{layout} wanted", is_wanted(layout))
        os.kill(processes(cell)[1], signal.SIGKILL)
        await asyncio.to_thread(until, cell, f"{layout} again", serves(layout))

    streams = await streams_through(cell, f"{layout}, lost three times", lose)
    assert len(started(cell)) == starts + 3
    after = processes(cell)
    assert (after[0], after[2:]) == (before[0], before[2:])
    back(cell, layout)
    assert await exact(cell, streams)

"""SIGKILL of ranks under load: every stream goes on exactly, and the rank comes back.

Four ranks. Whatever is killed, in whatever layout: its tasks continue elsewhere from what was
delivered, ranks outside its group serve on, and it is started again, with the other members of its
group if they ended too. Times are printed; docs/faults.md has them.
"""

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness.bare_cell import BareCell, Stream, TaskClient, bare_cell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

TASKS = 8
TOKENS = 240
BEGUN_TOKENS = 20
"""All streams have so many when the rank is killed."""
BACK_LIMIT_S = 120.0
SHARED_MEMORY = Path("/dev/shm")
STARTED = '"event": "rank_started"'


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32, so that tokens must be identical; nothing is left of them."""
    with bare_cell(
        tmp_path_factory.mktemp("loss"),
        ranks=4,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
    ) as running:
        yield running
    started = [json.loads(line) for line in running.log("worker").splitlines() if STARTED in line]
    assert len(started) > 4
    assert [each for each in started if Path(f"/proc/{each['pid']}").exists()] == []
    names = [path.name for path in SHARED_MEMORY.iterdir()]
    for each in started:
        own = f"{each['dist_port']}-", f"aileron-board-{each['pid']}-"
        assert not [name for name in names if name.startswith(own)]


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    """Each task's tokens when nothing goes wrong."""

    async def calm() -> list[list[int]]:
        client = TaskClient()
        async with client.connected(cell):
            return [each.tokens for each in await client.finish(*submit(client, "calm"))]

    return asyncio.run(calm())


@pytest.fixture
def whole(cell: BareCell) -> BareCell:
    """The cell with groups of all widths, whatever an earlier test has done to it."""
    if any(rank["degraded"] for rank in ranks_of(cell)) or not can_be(cell, "tp4"):
        renew(cell)
    return cell


def ranks_of(cell: BareCell) -> list[dict[str, Any]]:
    return list(cell.get("/admin/ranks")["ranks"])


def can_be(cell: BareCell, layout: str) -> bool:
    try:
        cell.switch(layout, "reshard")
    except AssertionError:
        return False
    return True


def until(cell: BareCell, what: str, condition: Any) -> float:
    """Wait until the coordinator's views satisfy the condition; returns the seconds."""
    started = time.monotonic()
    while not condition(cell):
        views = cell.get("/admin/layout"), ranks_of(cell)
        assert time.monotonic() - started < BACK_LIMIT_S, f"not {what}: {views}"
        time.sleep(0.02)
    return time.monotonic() - started


def all_serve(cell: BareCell) -> bool:
    layout = cell.get("/admin/layout")
    return bool(layout["serving"]) and "off" not in layout["layout"]


def renew(cell: BareCell) -> None:
    """Start all ranks again, together."""
    before = {rank["incarnation"] for rank in ranks_of(cell)}
    cell.processes["worker"].send_signal(signal.SIGUSR1)
    until(cell, "all new", lambda _: before.isdisjoint(r["incarnation"] for r in ranks_of(cell)))
    until(cell, "serving", all_serve)


def submit(client: TaskClient, tag: str) -> list[str]:
    names = [f"{tag}-{number}" for number in range(TASKS)]
    for number, name in enumerate(names):
        prompt = [10 + (number * 37 + place) % 4000 for place in range(20 + 7 * number)]
        temperature = 0.8 if number % 2 else 0.0
        client.submit(name, prompt, max_tokens=TOKENS, temperature=temperature, seed=number)
    return names


def kill(cell: BareCell, rank: int, pid: int) -> float:
    """SIGKILL a rank and wait until the coordinator knows; returns the seconds.

    By the rank's silence alone it would know after `lost_after_ms`.
    """
    os.kill(pid, signal.SIGKILL)
    seen_s = until(cell, "seen", lambda _: ranks_of(cell)[rank]["exited"])
    assert seen_s < cell.config.coordinator.lost_after_ms / 1e3
    return seen_s


async def streams_through_loss(
    cell: BareCell, tag: str, rank: int, switch_to: str | None = None
) -> list[Stream]:
    """Kill a rank in the middle of all streams (and of a switch); returns them at their end."""
    client, pid = TaskClient(), int(ranks_of(cell)[rank]["pid"])
    async with client.connected(cell):
        names = submit(client, tag)
        while any(len(client.streams[name].tokens) < BEGUN_TOKENS for name in names):
            await asyncio.sleep(0.005)
        assert not all(client.streams[name].finished for name in names)
        if switch_to is not None:
            await asyncio.to_thread(cell.ask, switch_to, "reshard")
        seen_s = await asyncio.to_thread(kill, cell, rank, pid)
        streams = await client.finish(*names)
    pauses = [max(b - a for a, b in pairwise(stream.times)) for stream in streams]
    print(
        f"{tag}: exit seen after {seen_s * 1e3:.0f} ms, longest pause of a stream "
        f"{max(pauses) * 1e3:.0f} ms, median {statistics.median(pauses) * 1e3:.0f} ms, "
        f"submitted again {sum(stream.resumed for stream in streams)}"
    )
    return streams


def back(cell: BareCell, tag: str) -> None:
    """All ranks serve again, and their pages add up with nothing held."""
    took_s = until(cell, "back", all_serve)
    print(f"{tag}: all ranks serve {took_s:.1f} s after the last stream ended")

    def is_full(_: BareCell) -> bool:
        groups = cell.get("/admin/layout")["groups"]
        return all(group["pages_free"] == group["pages_total"] > 0 for group in groups)

    until(cell, "idle with all pages", is_full)
    cell.pages()


def tokens_of(streams: list[Stream]) -> list[list[int]]:
    return [stream.tokens for stream in streams]


async def test_no_stream_notices_that_ranks_die(whole: BareCell, expected: list[list[int]]) -> None:
    """In a group (a follower, in the middle of steps), in a switch (a leader), and in dp."""
    cell = whole
    cell.switch("tp2+tp2", "reshard")
    others = {rank["rank"]: rank["pid"] for rank in ranks_of(cell)[2:]}
    born = cell.get("/admin/layout")["groups"][1]["born"]
    streams = await streams_through_loss(cell, "follower in tp2", 1)
    assert tokens_of(streams) == expected
    back(cell, "follower in tp2")
    group = cell.get("/admin/layout")["groups"][-1]
    assert (group["ranks"], group["born"]) == ([2, 3], born), "the other group served on"
    assert {rank["rank"]: rank["pid"] for rank in ranks_of(cell)[2:]} == others

    cell.switch("dp4", "reshard")
    streams = await streams_through_loss(cell, "leader in a switch", 2, "dp2+tp2")
    assert tokens_of(streams) == expected
    back(cell, "leader in a switch")

    cell.switch("dp4", "reshard")
    streams = await streams_through_loss(cell, "rank in dp", 0)
    assert tokens_of(streams) == expected
    assert any(stream.resumed for stream in streams)
    back(cell, "rank in dp")
    alone = ranks_of(cell)[0]
    assert alone["restarts"] >= 1
    assert alone["degraded"]
    assert not can_be(cell, "tp4"), "it has no communicators with the others"


async def test_all_ranks_are_started_again_together(
    whole: BareCell, expected: list[list[int]]
) -> None:
    """Where nobody is left, tasks wait; afterwards groups of all widths can be formed again."""
    client = TaskClient()
    async with client.connected(whole):
        names = submit(client, "renewed")
        while any(len(client.streams[name].tokens) < BEGUN_TOKENS for name in names):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(renew, whole)
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    whole.switch("tp4", "reshard")
    whole.switch("dp4", "reshard")
    back(whole, "all")

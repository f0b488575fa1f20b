"""Ranks that stand still, get stuck, or cannot be heard: streams go on exactly, and they come back.

Four ranks whose coordinator takes 2.4 s of silence for the end, and between them a proxy that can
swallow what one of them says or hears. Times are printed; docs/faults.md has them. More of each
kind is run by `make chaos`.
"""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.lost_ranks import (
    BACK_LIMIT_S,
    TASKS,
    TOKENS,
    back,
    begun,
    calm_tokens,
    four_ranks,
    is_cut_out,
    pid_of,
    ranks_of,
    serves,
    submit,
    tell_pauses,
    tokens_of,
    until,
)
from tests.harness.cells.servers import free_port
from tests.harness.faults.fault_proxy import DOWN, UP, FaultProxy
from tests.harness.faults.frozen import frozen_main_thread

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(500)]

LEASE_MS, LOST_AFTER_MS = 2_000, 2_400
STAGE_LIMIT_MS, STEP_LIMIT_MS = 2_000, 6_000
"""Who stands still as a whole is let go on before that."""
SLOW_FACTOR = 5.0
SEEN_LIMIT_S = 30.0
"""What stands still, or cannot be heard, is left out within the lease and `lost_after_ms`: 4.4 s.
TCP alone would notice a connection that is broken in one direction after a minute."""


@pytest.fixture(scope="module")
def proxy() -> FaultProxy:
    """Where the ranks look for their coordinator."""
    return FaultProxy(free_port())


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory, proxy: FaultProxy) -> Iterator[BareCell]:
    port = free_port()
    with (
        proxy.running(f"127.0.0.1:{port}"),
        four_ranks(
            tmp_path_factory.mktemp("hangs"),
            proxy_port=proxy.port,
            listen=f"127.0.0.1:{port}",
            lease_ms=LEASE_MS,
            lost_after_ms=LOST_AFTER_MS,
            stage_limit_ms=STAGE_LIMIT_MS,
            slow_factor=SLOW_FACTOR,
            limits={"step_limit_ms": STEP_LIMIT_MS},
        ) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    return asyncio.run(calm_tokens(cell))


async def streams_through(
    cell: BareCell,
    tag: str,
    break_it: Callable[[], None],
    rank: int,
    mend_it: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """Break something in the middle of all streams; returns them at their end, exact or not.

    `mend_it` is called when others have taken over.
    """
    client = TaskClient()
    async with client.connected(cell):
        names = submit(client, tag)
        await begun(client, names)
        break_it()
        seen_s = await asyncio.to_thread(until, cell, "cut out", lambda _: is_cut_out(cell, rank))
        mend_it()
        streams = await client.finish(*names)
    print(f"{tag}: cut out after {seen_s:.2f} s")
    assert seen_s < SEEN_LIMIT_S
    tell_pauses(tag, streams)
    return streams


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("tp2+tp2", 1),
        pytest.param("dp4", 3, marks=pytest.mark.chaos),
        pytest.param("dp2+tp2", 2, marks=pytest.mark.chaos),
    ],
)
async def test_a_rank_that_stands_still(
    cell: BareCell, expected: list[list[int]], layout: str, rank: int
) -> None:
    """A follower, a leader, and a rank alone: SIGSTOP, and SIGCONT when others have taken over.

    Nobody ends, and the group that was called out of its collective can be formed again.
    """
    cell.switch(layout, "reshard")
    epoch = cell.get("/admin/layout")["epoch"]
    pids = [each["pid"] for each in ranks_of(cell)]
    pid, tag, logged = pids[rank], f"{rank} of {layout} stopped", len(cell.log("worker"))

    def go_on() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    try:
        stop = lambda: os.kill(pid, signal.SIGSTOP)  # noqa: E731
        streams = await streams_through(cell, tag, stop, rank, go_on)
        assert tokens_of(streams) == expected
    finally:
        go_on()
    back(cell, tag)
    assert cell.get("/admin/layout")["epoch"] > epoch
    assert "rank_stuck" not in cell.log("worker")[logged:], "it heard in time what was lost"
    assert [each["pid"] for each in ranks_of(cell)] == pids
    cell.switch(layout, "reshard")
    client = TaskClient()
    async with client.connected(cell):
        assert tokens_of(await client.finish(*submit(client, f"{tag}, and again"))) == expected
    back(cell, tag)


@pytest.mark.parametrize(
    "directions",
    [
        pytest.param((DOWN,), id="down"),
        pytest.param((UP,), id="up", marks=pytest.mark.chaos),
        pytest.param((UP, DOWN), id="both", marks=pytest.mark.chaos),
    ],
)
async def test_a_rank_that_its_coordinator_cannot_reach(
    cell: BareCell, proxy: FaultProxy, expected: list[list[int]], directions: tuple[str, ...]
) -> None:
    """Its lease ends before others take its tasks over, so no token comes twice."""
    cell.switch("dp4", "reshard")
    pid, tag = pid_of(cell, 1), f"no way {' and '.join(directions)}"
    try:
        streams = await streams_through(cell, tag, lambda: proxy.cut(pid, *directions), 1)
        assert tokens_of(streams) == expected
    finally:
        proxy.heal()
    back(cell, tag)
    assert pid_of(cell, 1) == pid, "it came back as the process that it was"


@pytest.fixture
def link() -> Iterator[FaultProxy]:
    """Between the ranks and the socket where a gateway takes their tokens."""
    with FaultProxy(free_port()).running(f"127.0.0.1:{free_port()}") as made:
        yield made


def is_cut_off(cell: BareCell, rank: int, link: FaultProxy) -> bool:
    """The circuit of the rank's link to the gateway is open."""
    return f"tcp://127.0.0.1:{link.port}" in ranks_of(cell)[rank]["cut_off"]


async def streams_over(
    cell: BareCell, link: FaultProxy, tag: str, break_it: Callable[[], None], rank: int
) -> list[Stream]:
    """Break the link of a rank in the middle of all streams; returns them at their end."""
    client = TaskClient()
    async with client.connected(cell, link):
        names = submit(client, tag)
        await begun(client, names)
        break_it()
        seen_s = await asyncio.to_thread(
            until, cell, "cut off", lambda _: is_cut_off(cell, rank, link)
        )
        streams = await client.finish(*names)
        print(f"{tag}: the circuit is open after {seen_s:.2f} s")
        tell_pauses(tag, streams)
        assert seen_s < SEEN_LIMIT_S
        assert is_cut_off(cell, rank, link), "streams went on without the link"
        assert not is_cut_out(cell, rank), "the rank goes on serving others"
        link.heal()
        took_s = await asyncio.to_thread(
            until, cell, "used", lambda _: not is_cut_off(cell, rank, link)
        )
        print(f"{tag}: the circuit is closed {took_s:.2f} s after the link is back")
        assert tokens_of(await client.finish(*submit(client, "behind"))) == tokens_of(streams)
    return streams


@pytest.mark.parametrize(
    "directions",
    [
        pytest.param((UP, DOWN), id="both"),
        pytest.param((UP,), id="to gateway", marks=pytest.mark.chaos),
        pytest.param((DOWN,), id="to rank", marks=pytest.mark.chaos),
    ],
)
async def test_a_rank_that_a_gateway_cannot_be_reached_from(
    cell: BareCell, link: FaultProxy, expected: list[list[int]], directions: tuple[str, ...]
) -> None:
    """Its streams go on from other ranks, whatever of the old ones comes late when it heals."""
    cell.switch("dp4", "reshard")
    pid, tag = pid_of(cell, 1), f"no link {directions}"
    try:
        streams = await streams_over(cell, link, tag, lambda: link.cut(pid, *directions), 1)
    finally:
        link.heal()
    assert tokens_of(streams) == expected
    back(cell, tag)
    assert pid_of(cell, 1) == pid


@pytest.mark.chaos
async def test_a_link_that_comes_and_goes(
    cell: BareCell, link: FaultProxy, expected: list[list[int]]
) -> None:
    """What is under way is lost each time, and no stream misses a token of it or has one twice."""
    cell.switch("dp4", "reshard")
    pid, client, changes, was_open = pid_of(cell, 1), TaskClient(), 0, False
    async with client.connected(cell, link):
        for tag in ("flapping", "flapping on"):
            names = submit(client, tag)
            await begun(client, names)
            finish = asyncio.create_task(client.finish(*names))
            while not (finish.done() and changes):
                link.reset(pid)
                await asyncio.sleep(0.1)
                is_open = await asyncio.to_thread(is_cut_off, cell, 1, link)
                changes, was_open = changes + (is_open is not was_open), is_open
            streams = await finish
            tell_pauses(tag, streams)
            assert tokens_of(streams) == expected
    print(f"flapping: the circuit changed {changes} times")
    assert 1 <= changes <= 3, "the more often it breaks, the longer it is left alone"
    assert pid_of(cell, 1) == pid
    back(cell, "flapping")


async def test_a_main_thread_that_never_goes_on(cell: BareCell, expected: list[list[int]]) -> None:
    """As in a collective that never ends: the process says that it lives, but nothing comes.

    A switch goes on without it, and then its own watchdog ends it.
    """
    cell.switch("dp4", "reshard")
    others, client = [each["pid"] for each in ranks_of(cell)], TaskClient()
    pid, tag = others.pop(), "main thread held"

    def hold() -> tuple[float, float]:
        with frozen_main_thread(pid) as held:
            cell.ask("tp2+dp2", "reshard")
            without_s = held.until(lambda: serves("tp2+dp1+off1")(cell), BACK_LIMIT_S)
            return without_s, held.until(lambda: pid_of(cell, 3) != pid, BACK_LIMIT_S)

    async with client.connected(cell):
        names = submit(client, tag)
        await begun(client, names)
        without_s, new_s = await asyncio.to_thread(hold)
        streams = await client.finish(*names)
    print(f"{tag}: served without it after {without_s:.1f} s, a new process {new_s:.1f} s later")
    tell_pauses(tag, streams)
    assert tokens_of(streams) == expected
    assert "rank_stuck" in cell.log("worker")
    back(cell, tag)
    assert [each["pid"] for each in ranks_of(cell)][:3] == others


@contextmanager
def ten_times_slower(pid: int) -> Iterator[None]:
    """Let a process run for a tenth of the time only."""
    enough = threading.Event()

    def pulse() -> None:
        while not enough.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.045)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


async def kept_busy(client: TaskClient) -> None:
    """Give all ranks something to do until this is cancelled: an idle one cannot be compared with.

    How long it takes to find a slow rank does not depend on the pace of the machine; streams do.
    """

    async def one_after_the_other(place: int) -> None:
        for turn in itertools.count():
            name = f"busy-{place}-{turn}"
            client.submit(name, [10 + place] * 20, max_tokens=900)
            await client.finish(name)

    await asyncio.gather(*map(one_after_the_other, range(TASKS)))


async def test_a_rank_that_is_ten_times_slower(cell: BareCell, expected: list[list[int]]) -> None:
    """It is left out, alive, and its streams go on where steps take as long as they should.

    The last test here: the rank stays out for longer than a test should wait.
    """
    cell.switch("dp4", "reshard")
    pid, client = pid_of(cell, 2), TaskClient()
    async with client.connected(cell):
        names = submit(client, "slow", tokens=900)
        await begun(client, names)
        others = asyncio.create_task(kept_busy(client))
        with ten_times_slower(pid):
            took_s = await asyncio.to_thread(until, cell, "left out", lambda _: is_cut_out(cell, 2))
            while any(len(client.streams[name].tokens) < TOKENS for name in names):
                assert not [each.failure for each in client.streams.values() if each.failure]
                await asyncio.sleep(0.005)
        others.cancel()
        for name in client.streams:
            client.cancel(name)
    streams = [client.streams[name] for name in names]
    print(f"slow rank: left out after {took_s:.1f} s")
    tell_pauses("slow rank", streams)
    assert [each.tokens[:TOKENS] for each in streams] == expected
    slow = ranks_of(cell)[2]
    assert slow["pid"] == pid
    assert slow["out_ms"] > 0
    assert not slow["exited"]
    assert cell.get("/admin/layout")["layout"] == "dp2+off1+dp1"

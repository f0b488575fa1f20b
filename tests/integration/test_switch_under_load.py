"""50 streams through 20 switches: complete, exact, nothing leaked; then 60 idle switches."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.harness.cells.client_streams import all_streams
from tests.harness.cells.product import Product, product

pytestmark = pytest.mark.ranks

SWITCHES = 20
READY_EVERY_S = 0.02
EVERY_PLAN = (
    *(("tp2", "pause"), ("dp2", "recompute"), ("tp2", "reshard"), ("dp2", "reshard")),
    *(("tp2", "reshard"), ("dp2", "pause"), ("tp2", "recompute"), ("dp2", "drain")),
)
IDLE_SWITCHES = 60
STREAM_TOKENS = 250
"""Of each stream: enough for streams to run through most switches on a fast machine."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two ranks in fp32, so that tokens must be identical."""
    with product(
        tmp_path_factory.mktemp("switching"), ranks=2, engine_args=["--dtype", "float32"]
    ) as running:
        yield running


async def switch_many(cell: Product, done: "asyncio.Task[Any]") -> list[Any]:
    """Switch by every plan in turn while streams run; returns the answers."""
    answers = []
    for layout, carry in itertools.islice(itertools.cycle(EVERY_PLAN), SWITCHES):
        # A drain that starts while streams run would wait for them all, so it comes when little is
        # left.
        plan = "recompute" if carry == "drain" and not done.done() else carry
        answers.append(await asyncio.to_thread(cell.switch, layout, plan))
        await asyncio.sleep(0.1)
    return answers


@asynccontextmanager
async def watching_readiness(cell: Product) -> AsyncIterator[Counter[int]]:
    """Ask `/ready` all the time, as load balancers do; yields how often each status came."""
    statuses: Counter[int] = Counter()

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=cell.url, timeout=30) as client:
            while True:
                statuses[(await client.get("/ready")).status_code] += 1
                await asyncio.sleep(READY_EVERY_S)

    asking = asyncio.create_task(ask())
    yield statuses
    assert not asking.done(), "a question went unanswered"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.timeout(420)
async def test_no_stream_notices_twenty_switches(cell: Product) -> None:
    expected = await all_streams(cell.url, tokens=STREAM_TOKENS)
    before = cell.pages_free_and_leased()
    running = asyncio.create_task(all_streams(cell.url, tokens=STREAM_TOKENS))
    await asyncio.sleep(0.5)
    async with watching_readiness(cell) as ready:
        answers = await switch_many(cell, running)
    heard = await running
    print(f"ready {ready[200]} times while it switched")
    assert set(ready) == {200}, "it is ready through every switch"
    assert ready[200] >= SWITCHES
    assert len(answers) == SWITCHES
    for number, (one, other) in enumerate(zip(expected, heard, strict=True)):
        assert other.tokens == STREAM_TOKENS, (number, other.tokens)
        assert other.finish_reason == "length", number
        assert "".join(other.text) == "".join(one.text), number
    switches = cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    crossed = sum(sum(record["tasks"].values()) for record in switches)
    assert crossed > SWITCHES, "the switches met no running tasks"
    moves = [record for record in switches if record["carry"] == "reshard"]
    assert sum(record["tasks"]["reshard"] for record in moves) > 0, moves
    assert await asyncio.to_thread(settled, cell, before), cell.pages_free_and_leased()


def settled(cell: Product, before: list[dict[str, Any]]) -> bool:
    """Whether pages come back to where they were, with nothing held by tasks."""
    cell.switch("dp2", "recompute")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        groups = cell.get("/admin/layout")["groups"]
        idle = all(group["running"] == group["waiting"] == 0 for group in groups)
        full = all(group["pages_free"] == group["pages_total"] for group in groups)
        if idle and full and cell.pages_free_and_leased() == before:
            return True
        time.sleep(0.2)
    return False


def switch_idle(cell: Product) -> list[dict[str, Any]]:
    """Switch while nothing runs; returns the records."""
    for layout in ("tp2", "dp2") * (IDLE_SWITCHES // 2):
        cell.switch(layout, "pause")
    records: list[dict[str, Any]] = cell.get(f"/admin/switches?last={IDLE_SWITCHES}")["switches"]
    return records


def gauges(cell: Product) -> list[dict[str, int]]:
    time.sleep(0.6)  # Gauges travel with the heartbeat.
    return [dict(rank["gauges"]) for rank in cell.get("/admin/ranks")["ranks"]]


@pytest.mark.timeout(240)
def test_idle_switches_leak_nothing(cell: Product) -> None:
    for layout in ("tp2", "dp2") * 5:
        cell.switch(layout, "pause")
    before = gauges(cell)
    records = switch_idle(cell)
    after = gauges(cell)
    assert len(records) == IDLE_SWITCHES
    for old, new in zip(before, after, strict=True):
        assert new["process_groups"] == new["process_groups_at_start"]
        assert new["open_files"] <= old["open_files"] + 2
        assert new["threads"] <= old["threads"] + 2
        assert new["rss_bytes"] - old["rss_bytes"] < 8 << 20
    for record in records:
        assert {"epoch", "from", "to", "cause", "tasks", "decide_ms", "park_ms"} <= record.keys()
        assert {"reshard_ms", "reshard_bytes", "first_step_ms", "gap_ms_max"} <= record.keys()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_idle_switches_are_quick(cell: Product) -> None:
    """Long: it measures milliseconds, which other tests on these cores would change."""
    records = switch_idle(cell)
    swaps = sorted(record["swap_ms"] for record in records)
    totals = sorted(record["total_ms"] for record in records)
    print("swap and switch ms, sorted:", swaps, totals)
    assert swaps[len(swaps) * 19 // 20] < 1.0, "the swap itself must take less than 1 ms"
    assert totals[len(totals) * 19 // 20] < 100.0, "an idle switch must take less than 100 ms"

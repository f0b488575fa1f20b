"""50 streams through 20 switches: complete, exact, nothing leaked; then 200 idle switches."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.harness.cells.client_streams import TOKENS, Heard, all_streams
from tests.harness.cells.product import Product, product

pytestmark = pytest.mark.slow

SWITCHES = 20
READY_EVERY_S = 0.02
RESHARD = (("tp2", "reshard"), ("dp2", "reshard"))
EVERY_PLAN = (
    *(("tp2", "pause"), ("dp2", "recompute"), ("tp2", "reshard"), ("dp2", "pause")),
    *(("tp2", "recompute"), ("dp2", "drain")),
)
Cycle = tuple[tuple[str, str], ...]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two ranks in fp32, so that tokens must be identical."""
    with product(
        tmp_path_factory.mktemp("switching"), ranks=2, engine_args=["--dtype", "float32"]
    ) as running:
        yield running


async def switch_many(cell: Product, done: "asyncio.Task[Any]", cycle: Cycle) -> list[Any]:
    """Switch through the cycle while streams run; returns the answers."""
    answers = []
    for layout, carry in itertools.islice(itertools.cycle(cycle), SWITCHES):
        # A drain that starts while streams run would wait for them all, so it comes when little is
        # left.
        plan = "recompute" if carry == "drain" and not done.done() else carry
        answers.append(await asyncio.to_thread(cell.switch, layout, plan))
        await asyncio.sleep(0.3)
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


@pytest.fixture(scope="module")
def undisturbed(cell: Product) -> list[Heard]:
    """The streams without any switch."""
    return asyncio.run(all_streams(cell.url))


@pytest.mark.parametrize("cycle", [RESHARD, EVERY_PLAN], ids=["reshard", "every plan"])
@pytest.mark.timeout(420)
async def test_no_stream_notices_twenty_switches(
    cell: Product, undisturbed: list[Heard], cycle: Cycle
) -> None:
    expected = undisturbed
    before = cell.pages_free_and_leased()
    running = asyncio.create_task(all_streams(cell.url))
    await asyncio.sleep(1.0)
    async with watching_readiness(cell) as ready:
        answers = await switch_many(cell, running, cycle)
    heard = await running
    print(f"ready {ready[200]} times while it switched")
    assert set(ready) == {200}, "it is ready through every switch"
    assert ready[200] >= SWITCHES
    assert len(answers) == SWITCHES
    for number, (one, other) in enumerate(zip(expected, heard, strict=True)):
        assert other.tokens == TOKENS, (number, other.tokens)
        assert other.finish_reason == "length", number
        assert "".join(other.text) == "".join(one.text), number
    switches = cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    crossed = sum(sum(record["tasks"].values()) for record in switches)
    assert crossed > SWITCHES, "the switches met no running tasks"
    if cycle is RESHARD:
        assert crossed == sum(record["tasks"]["reshard"] for record in switches), switches
        pauses = sorted(record["gap_ms_max"] for record in switches if record["gap_ms_max"])
        print("longest pause of a client by switch, ms:", [round(each) for each in pauses])
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


@pytest.mark.timeout(240)
async def test_two_hundred_switches_leak_nothing(cell: Product) -> None:
    def gauges() -> list[dict[str, int]]:
        time.sleep(0.6)  # Gauges travel with the heartbeat.
        return [dict(rank["gauges"]) for rank in cell.get("/admin/ranks")["ranks"]]

    for layout in ("tp2", "dp2") * 5:
        cell.switch(layout, "pause")
    before = gauges()
    for layout in ("tp2", "dp2") * 100:
        cell.switch(layout, "pause")
    after = gauges()
    records = cell.get("/admin/switches?last=200")["switches"]
    assert len(records) == 200
    for old, new in zip(before, after, strict=True):
        assert new["process_groups"] == new["process_groups_at_start"]
        assert new["open_files"] <= old["open_files"] + 2
        assert new["threads"] <= old["threads"] + 2
        assert new["rss_bytes"] - old["rss_bytes"] < 8 << 20
    swaps = sorted(record["swap_ms"] for record in records)
    totals = sorted(record["total_ms"] for record in records)
    print("swap ms p50/p99:", swaps[100], swaps[197], "switch ms:", totals[100], totals[197])
    assert swaps[190] < 1.0, "the swap itself must take less than 1 ms"
    assert totals[190] < 100.0, "a pause switch of idle ranks must take less than 100 ms"
    for record in records:
        assert {"epoch", "from", "to", "cause", "tasks", "decide_ms", "park_ms"} <= record.keys()
        assert {"reshard_ms", "reshard_bytes", "first_step_ms", "gap_ms_max"} <= record.keys()

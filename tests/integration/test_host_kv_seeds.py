"""Random requests with few pages on the device, few in host memory, switches and kills: exact.

Seeds are fixed; AILERON_RESHARD_SEEDS="17" or "100-199" runs others. A failure names its seed.
Greedy streams are what plain vLLM makes of the request alone; sampled ones, whose draws are ours
(ADR 0009), are what the same cell makes of it without switches.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.admin import post
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.random_load import RANDOM_ARGS, alone, compare, run_cases, settle
from tests.harness.vllm.reshard_cases import Case, wanted_cases
from tests.harness.vllm.static_answers import static_answers

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

SEEDS = 32
FEW_PAGES_BYTES = 8 << 20
HOST_KV_GIB = 0.03
"""Less than the tasks need together, so pages are evicted."""
ROUNDS = 3
AT_ONCE = 20
KILL_EVERY, FIRST_KILL = 8, 2
"""Of the actions: the others are switches."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """One request per seed."""
    return wanted_cases(SEEDS)


@pytest.fixture(scope="module")
def static(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What plain vLLM generates for the greedy ones, and the log-probabilities of it."""
    return static_answers(cases, tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="module", params=["worker", "tests.harness.faults.aside_worker"])
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    """Copies are part of steps, or beside them as on CUDA."""
    with bare_cell(
        tmp_path_factory.mktemp("host-seeds"),
        ranks=2,
        worker=request.param,
        engine_args=[*RANDOM_ARGS, "--kv-cache-memory-bytes", str(FEW_PAGES_BYTES)],
        limits={"host_kv_gib": HOST_KV_GIB},
        # Two long pauses in a row would let a task that waits for pages seem to hang.
        pause_limit_ms=5_000,
    ) as running:
        yield running


def count_tokens(client: TaskClient) -> int:
    return sum(len(stream.tokens) for stream in client.streams.values())


class Totals:
    """Sums of gauges over the ranks, through restarts: a new process counts from 0."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], dict[str, int]] = {}

    def look(self, cell: BareCell) -> None:
        for rank in cell.get("/admin/ranks")["ranks"]:
            if "gauges" in rank:
                self._last[rank["rank"], rank["incarnation"]] = rank["gauges"]

    def of(self, name: str) -> int:
        return sum(each.get(name, 0) for each in self._last.values())


async def test_streams_are_exact_over_preemption_switches_and_kills(
    cell: BareCell, cases: list[Case], static: dict[int, Any]
) -> None:
    draw = random.Random(len(cases))
    reference = await alone(cell, [case for case in cases if not case.is_greedy])
    before = settle(cell)
    totals, actions, kills, switches = Totals(), 0, 0, 0
    client = TaskClient()
    async with client.connected(cell):

        async def rounds() -> list[dict[int, Stream]]:
            return [
                await run_cases(client, f"host-{number}", cases, AT_ONCE)
                for number in range(ROUNDS)
            ]

        running = asyncio.create_task(rounds())

        async def go_on() -> None:
            """Let tasks get some tokens first: a slow machine would only ever begin them again."""
            wanted = count_tokens(client) + draw.randint(20, 300)
            while not running.done() and count_tokens(client) < wanted:
                await asyncio.sleep(0.01)

        await go_on()
        while not running.done():
            totals.look(cell)
            ranks = cell.get("/admin/ranks")["ranks"]
            actions += 1
            is_whole = all(rank.get("available") for rank in ranks)
            if actions % KILL_EVERY == FIRST_KILL and is_whole:
                os.kill(draw.choice(ranks)["pid"], signal.SIGKILL)
                kills += 1
                await go_on()
                continue
            carry = draw.choice(["reshard", "recompute", "pause"])
            wanted = {"layout": draw.choice(["dp2", "tp2", "sp2"]), "carry": carry}
            status, answer = await asyncio.to_thread(post, cell.admin + "/admin/layout", wanted)
            # While a rank is away, a layout that names it is refused.
            assert status == 200 or "not available" in answer["error"]["message"], answer
            switches += status == 200
            await go_on()
        served = await running
    totals.look(cell)
    worst = max(compare(cases, streams, static, reference) for streams in served)
    resumed = sum(stream.resumed for streams in served for stream in streams.values())
    counts = {
        name: totals.of(name)
        for name in ("preemptions", "host_hits", "host_full_blocks", "computed_tokens")
    }
    print(f"\n{switches} switches, {kills} kills, {resumed} resumed, {counts}, within {worst:.1e}")
    assert counts["host_hits"] > 0
    assert kills or len(cases) < SEEDS
    while not all(rank.get("available") for rank in cell.get("/admin/ranks")["ranks"]):
        await asyncio.sleep(0.2)
    assert settle(cell) == before
    assert "Traceback" not in Path(cell.folder / "worker.log").read_text()

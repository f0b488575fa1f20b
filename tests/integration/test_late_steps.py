"""Random requests through random switches of ranks that are late and have few pages: exact streams.

Seeds are fixed; AILERON_RESHARD_SEEDS="17" or "100-199" runs others, alone. A failure names its
seed. Greedy streams are what plain vLLM makes of the request alone; sampled ones, whose draws are
ours (ADR 0009), are what the same cell makes of it without switches.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.random_load import (
    RANDOM_ARGS,
    alone,
    compare,
    records_after,
    run_cases,
    settle,
)
from tests.harness.vllm.reshard_cases import Case, wanted_cases
from tests.harness.vllm.static_answers import static_answers

pytestmark = pytest.mark.ranks

SEEDS = 64
FEW_PAGES_BYTES = 28 << 20
"""So few that some moves take several rounds."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """One request per seed."""
    return wanted_cases(SEEDS)


@pytest.fixture(scope="module")
def static(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What plain vLLM generates for the greedy ones, and the log-probabilities of it."""
    return static_answers(cases, tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="module")
def late_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Two such ranks whose steps are under way for a while, as on CUDA, and with few pages."""
    with bare_cell(
        tmp_path_factory.mktemp("late"),
        ranks=2,
        engine_args=[*RANDOM_ARGS, "--kv-cache-memory-bytes", str(FEW_PAGES_BYTES)],
        worker="tests.harness.faults.late_worker",
        pause_limit_ms=30_000,  # A busy machine may take seconds to come back to a layout.
    ) as running:
        yield running


async def run_switching(cell: BareCell, tag: str, cases: list[Case], switch: Any) -> Any:
    """Serve all cases while `switch` is called again and again; returns streams and records."""
    epoch = cell.get("/admin/layout")["epoch"]
    client = TaskClient()
    async with client.connected(cell):
        running = asyncio.create_task(run_cases(client, tag, cases))
        await asyncio.sleep(0.2)
        while not running.done():
            await switch()
            cell.pages()
        try:
            streams = await running
        except AssertionError:
            print(cell.get("/admin/layout"), cell.get("/admin/status"))
            raise
    return streams, records_after(cell, epoch)


def epochs_of_several_rounds(cell: BareCell) -> set[int]:
    """The moves whose copies, for want of pages, come one behind the other."""
    events = events_of(cell.log("worker"), "move_short_of_pages")
    return {each["epoch"] for each in events if each["rounds"] > 1}


def epochs_of_spoiled_moves(cell: BareCell) -> set[int]:
    """The moves that were given up after they had overwritten KV: there is no way back to it."""
    return {each["epoch"] for each in events_of(cell.log("worker"), "move_spoiled")}


@pytest.mark.timeout(300)
async def test_streams_are_exact_where_groups_are_left_in_mid_step(
    late_cell: BareCell, cases: list[Case], static: dict[int, Any]
) -> None:
    """The last step of a group writes KV and brings tokens while the next layout is prepared."""
    draw = random.Random(3)
    cell = late_cell
    sampled = [case for case in cases if not case.is_greedy]
    reference = await alone(cell, sampled)
    before = settle(cell)

    async def switch() -> None:
        carry = draw.choice(["reshard", "reshard", "pause"])
        await asyncio.to_thread(cell.switch, draw.choice(["dp2", "tp2", "sp2"]), carry)
        if draw.random() < 0.3:
            await asyncio.to_thread(cell.ask, draw.choice(["dp2", "tp2"]), "reshard")
        await asyncio.sleep(draw.uniform(0.0, 0.25))

    streams, records = await run_switching(cell, "late", cases, switch)
    worst = compare(cases, streams, static, reference)
    moved = sum(record["tasks"]["reshard"] for record in records)
    paused = sum(record["tasks"]["pause"] for record in records)
    several = epochs_of_several_rounds(cell)
    spoiled = epochs_of_spoiled_moves(cell)
    assert spoiled <= {each["epoch"] for each in records if each["outcome"] == "superseded"}
    print(f"\n{len(records)} switches: {moved} moved, {paused} paused, within {worst:.1e};")
    print(f"several rounds {len(several)} times, {len(spoiled)} moves spoiled")
    assert several or len(cases) < SEEDS / 4
    assert min(moved, paused) > len(cases) / 8 or len(cases) < SEEDS / 4
    for record in records:
        is_behind = record["epoch"] - 1 in spoiled
        assert is_behind or record["tasks"]["recompute"] == 0, record
    assert settle(cell) == before
    assert "Traceback" not in Path(cell.folder / "worker.log").read_text()

"""Running tasks cross a switch in the next step: four ranks, exact streams, nothing recomputed."""

import itertools
from collections.abc import Iterator

import pytest

from tests.harness.bare_cell import BareCell, bare_cell
from tests.integration.test_four_ranks import LAYOUTS, TASKS, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32."""
    with bare_cell(
        tmp_path_factory.mktemp("reshard"),
        ranks=4,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        pause_limit_ms=60_000,
    ) as running:
        yield running


@pytest.mark.timeout(400)
async def test_running_tasks_go_on_in_every_other_layout(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    expected = await run(cell, "plain", [])
    pairs = [layout for pair in itertools.permutations(LAYOUTS, 2) for layout in pair]
    switches = [(layout, "reshard") for layout in pairs]
    third = len(switches) // 3
    for turn in range(3):
        cell.switch("dp4", "recompute")
        part = switches[turn * third : (turn + 1) * third]
        assert await run(cell, f"moved-{turn}", part) == expected, turn
    records = cell.get("/admin/switches?last=60")["switches"]
    moved = [record for record in records if record["carry"] == "reshard"]
    assert sum(record["tasks"]["reshard"] for record in moved) > 5 * TASKS
    assert sum(record["tasks"]["recompute"] for record in moved) == 0
    assert sum(record["reshard_bytes"] for record in moved) > 0

"""Where pages do not suffice for all, the most urgent tasks cross a switch, in several rounds."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from coordinator.protocol.terms import Tier
from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.log_events import events_of

pytestmark = pytest.mark.ranks

ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "1024")
SCARCE_PAGES = 48
CROWD = 24


@pytest.fixture(scope="module")
def scarce_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks whose pages a crowd of tasks fills."""
    with bare_cell(
        tmp_path_factory.mktemp("scarce"),
        ranks=4,
        engine_args=[*ENGINE_ARGS, "--num-gpu-blocks-override", str(SCARCE_PAGES)],
        pause_limit_ms=60_000,
    ) as running:
        yield running


@pytest.mark.timeout(300)
async def test_where_pages_are_scarce_the_less_urgent_are_recomputed(
    scarce_cell: BareCell,
) -> None:
    cell = scarce_cell
    cell.switch("dp4", "recompute")
    before = cell.pages()
    expected = await crowd(cell, "calm", [])
    layouts = ("tp4", "dp4", "tp2+tp2", "dp2+tp2", "tp4", "tp2+dp2", "dp4")
    assert await crowd(cell, "scarce", [*layouts]) == expected
    records = cell.get("/admin/switches?last=60")["switches"]
    moved = [record for record in records if record["carry"] == "reshard"]
    counts = {c: sum(r["tasks"][c] for r in moved) for c in ("reshard", "recompute")}
    shortages = events_of(cell.log("worker"), "move_short_of_pages")
    rounds = [each["rounds"] for each in shortages]
    left = {tier.name.lower(): [0, 0] for tier in Tier}
    for each in shortages:
        for place, name in enumerate(("carried", "left")):
            for tier, count in each[name].items():
                left[tier][place] += count
    print(f"\n{counts}; rounds {rounds}; carried and left by tier where scarce: {left}")
    assert max(rounds, default=1) > 1, "no move took several rounds"
    assert counts["recompute"] > 0, "no task was left behind"
    share = [left[tier.name.lower()][1] / max(1, sum(left[tier.name.lower()])) for tier in Tier]
    assert share[Tier.INTERACTIVE] <= share[Tier.STANDARD] <= share[Tier.BATCH], left
    cell.switch("dp4", "recompute")
    assert cell.pages() == before


async def crowd(cell: BareCell, tag: str, layouts: list[str]) -> list[list[int]]:
    """Tasks that nearly fill the memory, in three tiers; returns each one's tokens."""
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(CROWD)]
        for number, name in enumerate(names):
            draw = random.Random(number)
            prompt = draw.choices(range(10, 4000), k=draw.randint(80, 300))
            tier = Tier(number % 3)
            client.submit(name, prompt, tier=tier, max_tokens=180, temperature=0.7, seed=number)
        await asyncio.sleep(0.6)
        for layout in layouts:
            await asyncio.to_thread(cell.switch, layout, "reshard")
            cell.pages()
            await asyncio.sleep(0.15)
        return [stream.tokens for stream in await client.finish(*names)]

"""A cell of two ranks with halves of an AWQ checkpoint serves every layout, and survives a loss.

Sixteen streams cross twelve switches between layouts by chance, and a rank is killed under sixteen
streams in dp; fp32, so that tokens must be identical.
"""

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import (
    HASTY,
    SOON,
    back,
    begun,
    kill,
    pids_of,
    submit,
    tokens_of,
)
from tests.harness.vllm.quantized_models import write_quantized

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

LAYOUTS = ("dp2", "tp2", "sp2", "shift2")
SWITCHES = 12
TOKENS = 300
TOKENS_AGAIN = 60
"""Of each stream that is asked for once all ranks are back."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Two ranks that each hold half of all layers, as vLLM's quantization has made it."""
    folder = tmp_path_factory.mktemp("quantized")
    with bare_cell(
        folder,
        ranks=2,
        model=write_quantized(folder, "awq")[0],
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        limits={**SOON, "weight_parts": 2, "borrow": "all", "layout": "tp2"},
        worker="tests.harness.vllm.interpreted_worker",
        **HASTY,
    ) as up:
        yield up


def sixteen(client: TaskClient, tag: str, tokens: int = TOKENS) -> list[str]:
    """Ask for the same eight streams twice."""
    return [name for half in "ab" for name in submit(client, f"{tag}-{half}", tokens)]


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    """What the streams generate undisturbed, in tp."""

    async def calm() -> list[list[int]]:
        client = TaskClient()
        async with client.connected(cell):
            return tokens_of(await client.finish(*sixteen(client, "calm")))

    return asyncio.run(calm())


async def test_streams_are_exact_over_random_switches(
    cell: BareCell, expected: list[list[int]]
) -> None:
    """Nothing is computed again, and every layout has served."""
    draw, layout, visits = random.Random(31), "tp2", set[str]()
    client = TaskClient()
    async with client.connected(cell):
        names = sixteen(client, "switched")
        await begun(client, names)
        for _ in range(SWITCHES):
            layout = draw.choice([each for each in LAYOUTS if each != layout])
            visits.add(layout)
            await asyncio.to_thread(cell.switch, layout, "reshard")
        assert not all(client.streams[name].finished for name in names), "the streams are too short"
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    assert visits == set(LAYOUTS)
    records = cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    assert sum(record["tasks"]["recompute"] for record in records) == 0


async def test_a_rank_that_returns_finds_its_packed_part(
    cell: BareCell, expected: list[list[int]]
) -> None:
    """Its peer borrows from the same memory all the while."""
    await asyncio.to_thread(cell.switch, "dp2", "recompute")
    before, client = pids_of(cell), TaskClient()
    async with client.connected(cell):
        names = sixteen(client, "killed")
        await begun(client, names)
        await asyncio.to_thread(kill, cell, 1, before[1])
        streams = await client.finish(*names)
    assert tokens_of(streams) == expected
    back(cell, "rank 1")
    assert pids_of(cell)[0] == before[0]
    first, again = [
        each["loaded_bytes"]
        for each in events_of(cell.log("worker"), "rank_built")
        if each["rank"] == 1
    ]
    assert first > 0
    assert again == 0
    client = TaskClient()
    async with client.connected(cell):
        streams = await client.finish(*sixteen(client, "after", TOKENS_AGAIN))
    assert tokens_of(streams) == [tokens[:TOKENS_AGAIN] for tokens in expected]

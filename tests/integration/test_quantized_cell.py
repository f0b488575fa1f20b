"""A cell of two ranks with halves of an AWQ checkpoint serves every layout, and survives a loss.

Sixteen streams cross twelve switches between layouts by chance, and a rank is killed under sixteen
streams in dp; fp32, so that tokens must be identical.
"""

import asyncio
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
    tokens_of,
)
from tests.harness.cells.random_switches import cross_switches, sixteen
from tests.harness.vllm.quantized_models import write_quantized

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

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


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    """What the streams generate undisturbed, in tp."""

    async def calm() -> list[list[int]]:
        client = TaskClient()
        async with client.connected(cell):
            return tokens_of(await client.finish(*sixteen(client, "calm", TOKENS)))

    return asyncio.run(calm())


async def test_streams_are_exact_over_random_switches(
    cell: BareCell, expected: list[list[int]]
) -> None:
    """Nothing is computed again, and every layout has served."""
    client = TaskClient()
    async with client.connected(cell):
        names = sixteen(client, "switched", TOKENS)
        streams, _ = await cross_switches(cell, client, names, seed=31, switches=SWITCHES)
    assert tokens_of(streams) == expected


async def test_a_rank_that_returns_finds_its_packed_part(
    cell: BareCell, expected: list[list[int]]
) -> None:
    """Its peer borrows from the same memory all the while."""
    await asyncio.to_thread(cell.switch, "dp2", "recompute")
    before, client = pids_of(cell), TaskClient()
    async with client.connected(cell):
        names = sixteen(client, "killed", TOKENS)
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

"""A cell of two ranks: one that is killed returns and reads no weights, in whatever form it had."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.log_events import events_of
from tests.harness.cells.lost_ranks import (
    HASTY,
    SOON,
    back,
    begun,
    calm_tokens,
    kill,
    pids_of,
    submit,
    tell_pauses,
    tokens_of,
)
from tests.harness.faults.spoiled import spoiled, weight

NORM = "model.norm.weight"
"""It is whole in every form, and nobody borrows it."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


FORMS: dict[str, dict[str, Any]] = {
    "borrowed halves": {"weight_parts": 2, "borrow": "ffn"},
    "halves": {"weight_parts": 2, "borrow": "none", "layout": "tp2"},
    "replicas": {},
}
"""What each rank holds of the weights."""


@pytest.fixture(scope="module", params=FORMS)
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareCell]:
    """Two ranks in fp32, so that tokens must be identical; alone if they can compute so."""
    with bare_cell(
        tmp_path_factory.mktemp("again"),
        ranks=2,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        limits={**SOON, **FORMS[request.param]},
        **HASTY,
    ) as up:
        yield up


def built(cell: BareCell, rank: int) -> list[dict[str, Any]]:
    """What each process of a rank has said when it was built."""
    return [each for each in events_of(cell.log("worker"), "rank_built") if each["rank"] == rank]


async def test_streams_go_on_and_nothing_is_read(cell: BareCell) -> None:
    expected = await calm_tokens(cell)
    before, client = pids_of(cell), TaskClient()
    async with client.connected(cell):
        names = submit(client, "killed")
        await begun(client, names)
        await asyncio.to_thread(kill, cell, 1, before[1])
        streams = await client.finish(*names)
    tell_pauses("rank 1 of two", streams)
    assert tokens_of(streams) == expected, "the other rank may read the lost one's memory"
    back(cell, "rank 1")
    after = pids_of(cell)
    assert after[0] == before[0]
    assert after[1] != before[1]
    first, second = built(cell, 1)
    print("built in", first["seconds"], "s, again in", second["seconds"], "s")
    assert first["loaded_bytes"] > 0
    assert second["loaded_bytes"] == 0
    assert second["weights"] == first["weights"]
    assert await calm_tokens(cell) == expected
    cell.switch("tp2", "reshard")
    assert await calm_tokens(cell) == expected


async def test_weights_that_have_changed_in_memory_are_read_again(cell: BareCell) -> None:
    """The process that computes with them is killed, as an operator would."""
    expected, pid = await calm_tokens(cell), pids_of(cell)[1]
    with spoiled(pid, weight(NORM)) as places:
        assert places == 1, "the rank holds its weights once, in the cell's memory"
        await asyncio.to_thread(kill, cell, 1, pid)
    back(cell, "rank 1")
    *_, last = built(cell, 1)
    assert last["loaded_bytes"] > 0
    assert "part_changed" in cell.log("worker")
    assert await calm_tokens(cell) == expected

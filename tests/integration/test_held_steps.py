"""Ranks that die between the moment at which a group is left and its last step: exact streams.

Steps that are held wait for half a second here, so that this moment can be met.
"""

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.cells.bare_cell import BareCell
from tests.harness.cells.lost_ranks import (
    back,
    calm_tokens,
    four_ranks,
    streams_through_kill,
    tokens_of,
)
from tests.harness.faults.holding_worker import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.exact, pytest.mark.timeout(300)]

LOST = '"event": "held_step_lost"'


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    folder = tmp_path_factory.mktemp("held")
    with four_ranks(folder, worker="tests.harness.faults.holding_worker") as running:
        yield running


@pytest.fixture(scope="module")
def expected(cell: BareCell) -> list[list[int]]:
    return asyncio.run(calm_tokens(cell))


@pytest.mark.parametrize(
    ("origin", "wanted", "rank", "lose_it"),
    [
        ("tp4", "dp4", 3, 3),
        ("tp4", "dp4", 0, 3),
        ("tp2+tp2", "tp4", 1, 1),
        ("dp2+tp2", "tp2+tp2", 1, 0),
    ],
)
def test_the_others_live_on_and_give_its_tasks_back(
    cell: BareCell, expected: list[list[int]], origin: str, wanted: str, rank: int, lose_it: int
) -> None:
    """`lose_it` others held the step with the rank that is killed."""
    cell.switch(origin, "reshard")
    before = cell.log("worker").count(LOST)
    tag = f"rank {rank} killed from {origin} to {wanted} with its step held"
    running = streams_through_kill(cell, tag, rank, wanted, WAIT_S / 2)
    assert tokens_of(asyncio.run(running)) == expected
    back(cell, tag)
    assert cell.log("worker").count(LOST) - before == lose_it

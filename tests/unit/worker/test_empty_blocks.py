"""Blocks that tasks have in advance are carried, but nothing of them is copied."""

import pytest

from tests.harness.worker.manifests import BLOCK, GEOMETRY, cargo, dp, ints, target, tp
from worker.rank.migration.empty_blocks import without_empty_blocks
from worker.rank.migration.manifest import Manifest, MigrationPlan, plan_move

MORE, FILLED = ints(2, 3, 4), ints(2, 3)
TOKENS = BLOCK + 4
EMPTY = {"of ranks alone": {8, 9}, "of a wide group": {4}}
"""The units of block 4 on each rank: a page has two, and a slot of the wide group has one."""
PLACES = {
    "of ranks alone": ({0: dp(0, cargo("a", MORE, TOKENS)), 1: dp(1)}, target((0, 1))),
    "of a wide group": (tp((0, 1), cargo("a", MORE, TOKENS)), target((0,), (1,))),
}


def sources(move: MigrationPlan) -> set[tuple[int, int]]:
    """The (rank, unit) that are read."""
    return {
        pair
        for each in move.plan.copies
        for pair in zip(each.src_ranks.tolist(), each.src_units.tolist(), strict=True)
    }


@pytest.mark.parametrize("place", PLACES)
def test_what_has_no_token_is_not_copied(place: str) -> None:
    manifests, to = PLACES[place]
    move = plan_move(0, manifests, to, GEOMETRY)
    less = without_empty_blocks(move, manifests, BLOCK)
    assert sources(less) == {each for each in sources(move) if each[1] not in EMPTY[place]}
    assert sources(less) < sources(move)
    (carried,) = less.plan.carried
    assert carried.blocks.size == 3, "the task keeps it"
    for each in less.plan.copies:
        assert each.src_units.size == each.dst_units.size == each.src_ranks.size > 0


def test_a_block_with_one_token_is_copied() -> None:
    manifests: dict[int, Manifest] = {0: dp(0, cargo("a", FILLED, BLOCK + 1)), 1: dp(1)}
    move = plan_move(0, manifests, target((0, 1)), GEOMETRY)
    assert without_empty_blocks(move, manifests, BLOCK) is move

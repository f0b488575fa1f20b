"""Copies made while the old groups serve, and plans that find them there."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.reshard.early import EarlyPlan, plan_early
from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import EarlyBlocks, Ints, ReshardInput, UnitCopies
from tests.harness.kv.reshard_inputs import Shape, draw_input
from tests.harness.kv.reshard_model import Memory, Model, Unit, check_plan
from tests.harness.kv.reshard_shapes import shapes


def spare_of(asked: ReshardInput, share: float, draw: random.Random) -> dict[int, Ints]:
    """Some of the free pages of each rank."""
    return {
        rank: np.array(sorted(draw.sample(pages.tolist(), int(pages.size * share))), dtype=np.int64)
        for rank, pages in asked.free.items()
    }


def without_keys(asked: ReshardInput) -> ReshardInput:
    """The running tasks alone, whose blocks are known by their slots."""
    old = tuple(
        replace(
            group, chains=tuple(replace(each, keys=()) for each in group.chains if not each.cached)
        )
        for group in asked.old
    )
    return replace(asked, old=old)


def blocks_of(plan: EarlyPlan, done: int) -> list[EarlyBlocks]:
    """What a rank holds once the first `done` blocks are copied."""
    return [
        EarlyBlocks(name, plan.rank, places[at < done], plan.slots[at[at < done]])
        for name, (places, at) in plan.places.items()
        if (at < done).any()
    ]


def run(memory: Memory, copies: UnitCopies) -> None:
    rows = zip(
        copies.src_ranks.tolist(), copies.src_units.tolist(), copies.dst_units.tolist(), strict=True
    )
    for rank, source, target in rows:
        memory[Unit(copies.dst_rank, target)] = memory[Unit(rank, source)]


def holding(asked: ReshardInput, early: list[EarlyBlocks]) -> ReshardInput:
    """The same input once ranks hold these blocks: their pages are not free."""
    free = dict(asked.free)
    for each in early:
        width = next(len(group.ranks) for group in asked.new if each.rank in group.ranks)
        free[each.rank] = np.setdiff1d(free[each.rank], each.slots // width)
    return replace(asked, early=tuple(early), free=free)


def copied_early(asked: ReshardInput, share: float, draw: random.Random) -> ReshardInput:
    """Let each rank copy in two rounds, the first of them in part; check what it reads."""
    spare = spare_of(asked, share, draw)
    early: list[EarlyBlocks] = []
    for is_last in (False, True):
        now = without_keys(holding(asked, early))
        memory = Model.of(now).memory()
        for rank in asked.num_pages:
            plan = plan_early(now, rank, spare[rank])
            done = plan.size if is_last else plan.size // 2
            run(memory, plan.copies(0, done))
            early += blocks_of(plan, done)
        expected = Model.of(without_keys(holding(asked, early))).memory()
        for each in early:
            width = next(len(group.ranks) for group in asked.new if each.rank in group.ranks)
            units = Model.of(asked).units // width
            for slot in each.slots.tolist():
                for unit in range(slot * units, (slot + 1) * units):
                    where = Unit(each.rank, unit)
                    assert memory[where] == expected[where], "another unit was copied"
    return holding(asked, early)


@given(shapes(), st.randoms(use_true_random=False), st.sampled_from([0.3, 1.0]))
@settings(max_examples=120, deadline=None)
def test_plans_keep_their_promises_with_early_blocks(
    shape: Shape, order: random.Random, share: float
) -> None:
    asked = copied_early(draw_input(shape), share, order)
    check_plan(asked, plan_reshard(asked), order)


@given(shapes(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_nothing_is_copied_again_where_all_fits(shape: Shape, order: random.Random) -> None:
    """With ample pages, the plan copies no task's block, and overwrites no old one."""
    # A rank that serves alone afterwards needs a page for every slot of its old group's pages.
    fill = 0.5 / sum(len(ranks) for ranks in shape.old)
    roomy = replace(shape, fill=fill, spare=1.0, num_pages=60, cached=0, keyed=False, rounds_max=8)
    asked = copied_early(draw_input(roomy), 1.0, order)
    plan = plan_reshard(asked)
    assert not plan.fallbacks
    assert not plan.copies, f"{sum(each.src_units.size for each in plan.copies)} units are copied"

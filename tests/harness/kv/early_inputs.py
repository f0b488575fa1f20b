"""Inputs of the re-shard planner of which ranks have copied a part early, checked as they copy."""

import random
from dataclasses import replace

import numpy as np

from kvadaptor.reshard.early import EarlyPlan, plan_early
from kvadaptor.reshard.terms import EarlyBlocks, Ints, ReshardInput, UnitCopies
from tests.harness.kv.reshard_model import Memory, Model, Unit


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
            model = Model.of(asked)
            for slot in each.slots.tolist():
                for unit in model.units_of(model.new_group_of(each.rank), slot):
                    where = Unit(each.rank, unit)
                    assert memory[where] == expected[where], "another unit was copied"
    return holding(asked, early)

"""Blocks that tasks have in advance: they hold nothing yet, so nothing of them is copied. Pure."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvadaptor.reshard.blocks import joined
from kvadaptor.reshard.terms import UnitCopies
from worker.rank.migration.manifest import (
    Bools,
    Ints,
    Manifest,
    MigrationPlan,
    Ranks,
    units_of,
)


def without_empty_blocks(
    move: MigrationPlan, manifests: Mapping[int, Manifest], block_tokens: int
) -> MigrationPlan:
    """Return the plan of a migration from these manifests without copies of such blocks."""
    blocks_of: dict[Ranks, Ints] = {}
    for group in move.old_groups:
        states = (each.state for each in manifests[group[0]].cargo)
        blocks_of[group] = joined(
            each.blocks[-(-each.computed // block_tokens) :] for each in states
        )
    empty = units_of(blocks_of, move.plan.finest, manifests)
    if not empty:
        return move
    copies = (_filled(each, empty) for each in move.plan.copies)
    plan = replace(move.plan, copies=tuple(each for each in copies if each.src_units.size))
    return replace(move, plan=plan)


def _filled(copies: UnitCopies, empty: Mapping[int, Bools]) -> UnitCopies:
    is_filled = np.ones(copies.src_units.size, dtype=np.bool_)
    for rank, units in empty.items():
        own = np.flatnonzero(copies.src_ranks == rank)
        is_filled[own] = ~units[copies.src_units[own]]
    return replace(
        copies,
        src_ranks=copies.src_ranks[is_filled],
        src_units=copies.src_units[is_filled],
        dst_units=copies.dst_units[is_filled],
    )

"""A plan of a migration, made while the old groups serve, and what it is worth once they are left.

Planning takes milliseconds, in which all streams wait. In the last round of early copies all ranks
have published where all KV lies. They draft the plan from that. At the switch the draft holds if
no task has come, and none has other blocks: then tasks have got tokens or have ended, and that is
all. Pure: ranks with the same drafts find the same in the same manifests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from coordinator.protocol.terms import Target
from worker.rank.migration.manifest import (
    Manifest,
    MigrationPlan,
    TaskSnapshot,
    groups_around,
    newest_attempts,
    whole_groups,
    written_units,
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """The plan of a rank's component from the manifests of a round."""

    rank: int
    epoch: int
    round: int
    target: Target
    manifests: Mapping[int, Manifest]
    move: MigrationPlan

    def finished(self, manifests: Mapping[int, Manifest]) -> MigrationPlan | None:
        """Return the plan of the migration from these manifests; None if it has to be made anew."""
        move = self.move
        if groups_around(self.rank, manifests, self.target) != (
            move.ranks,
            move.bindings,
            move.old_groups,
        ):
            return None
        before = self.manifests
        if not all(
            manifests[each].draft == self.round and _has_same_pages(before[each], manifests[each])
            for each in move.ranks
        ):
            return None
        newest = newest_attempts(manifests[group[0]] for group in whole_groups(manifests))
        cargo: dict[str, tuple[int, TaskSnapshot]] = {}
        for leader in (group[0] for group in move.old_groups):
            if not _has_same_chains(before[leader], manifests[leader]):
                return None
            for each in manifests[leader].cargo:
                task = each.state.task
                known = move.cargo.get(task)
                is_newest = each.attempt == newest[task]
                if known is None or not (is_newest and _is_same(*known, leader, each)):
                    return None
                cargo[task] = leader, each
        carried = tuple(each for each in move.plan.carried if each.cached or each.id in cargo)
        return replace(
            move,
            plan=replace(move.plan, carried=carried),
            cargo=cargo,
            written=written_units(move.plan.finest, move.old_groups, manifests),
        )


def _has_same_pages(before: Manifest, now: Manifest) -> bool:
    """Return whether a rank's pages, its early copies and its groups are as they were."""
    return (
        (before.ranks, before.formation, before.num_pages)
        == (now.ranks, now.formation, now.num_pages)
        and np.array_equal(before.pages, now.pages)
        and np.array_equal(before.slots, now.slots)
        and np.array_equal(before.free, now.free)
        and before.indices.keys() == now.indices.keys()
        and all(np.array_equal(each, now.indices[ranks]) for ranks, each in before.indices.items())
        and [each.slots.size for each in before.early] == [each.slots.size for each in now.early]
    )


def _has_same_chains(before: Manifest, now: Manifest) -> bool:
    """Return whether all chains of finished requests are cached in the same blocks."""
    blocks_of = {each.hashes[-1]: each.blocks for each in now.chains}
    return all(
        each.hashes[-1] in blocks_of and np.array_equal(each.blocks, blocks_of[each.hashes[-1]])
        for each in before.chains
    )


def _is_same(leader: int, before: TaskSnapshot, leader_now: int, now: TaskSnapshot) -> bool:
    """Return whether a task has the blocks that it had."""
    return (leader, before.attempt, before.state.preemptions) == (
        leader_now,
        now.attempt,
        now.state.preemptions,
    ) and np.array_equal(before.state.blocks, now.state.blocks)

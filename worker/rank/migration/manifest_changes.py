"""What has changed in a rank's manifest since the round in which all ranks drafted the plan.

A task's list of blocks, hashes and tokens is long, and what it gets in a few steps is not. At the
cut, when all streams wait, ranks publish just that, if all have read the manifests of that round.
Where more has changed than tasks' progress and ends, the whole manifest is published.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from comm_pool.layout import Group, Rank
from coordinator.protocol.terms import TaskId
from worker.rank.migration.manifest import Ints, Manifest, TaskSnapshot
from worker.rank.runtime_protocol import Runtime
from worker.rank.task_state import StateChange


@dataclass(frozen=True, slots=True, eq=False)
class ManifestChanges:
    """The rest of a manifest is as it was in the round `draft`.

    `tasks` are places in its cargo, of those that have not ended: each has sent `emitted` tokens
    and made `progress`. `written` as there.
    """

    rank: int
    draft: int
    tasks: Sequence[int]
    emitted: Sequence[int]
    progress: Sequence[StateChange]
    written: Ints

    def __reduce__(self) -> Any:
        """Pack the progress of all tasks: small objects cost more than tuples."""
        rows = [
            (each.tokens, each.hashes, each.computed, each.settled, each.prefill_stats)
            for each in self.progress
        ]
        return _unpacked, (self.rank, self.draft, self.tasks, self.emitted, rows, self.written)

    @property
    def counts(self) -> list[int]:
        """How many tokens of each task are new."""
        return [len(each.tokens) for each in self.progress]

    def whole(self, before: Manifest) -> Manifest:
        """Return the manifest as it is now."""
        cargo = []
        for place, emitted, progress in zip(self.tasks, self.emitted, self.progress, strict=True):
            old = before.cargo[place]
            state = old.state.later(progress)
            cargo.append(TaskSnapshot(old.header, old.attempt, emitted, old.payload, state))
        return replace(before, cargo=tuple(cargo), written=self.written, draft=self.draft)


def _unpacked(
    rank: int,
    draft: int,
    tasks: Sequence[int],
    emitted: Sequence[int],
    rows: Iterable[tuple[list[int], list[bytes], int, int, Any]],
    written: Ints,
) -> ManifestChanges:
    """Rebuild the changes that `ManifestChanges.__reduce__` packed."""
    progress = [StateChange(*row) for row in rows]
    return ManifestChanges(rank, draft, tasks, emitted, progress, written)


def changes_since(
    before: Manifest, runtime: Runtime, rank: Rank, group: Group, formation: int, draft: int
) -> ManifestChanges | None:
    """Return what has changed for a rank that has left its group; None: more than tasks' progress.

    `before` is what it published in the round `draft`. The rank has copied nothing since.
    """
    own = tuple(int(each) for each in group.ranks), formation
    if (before.ranks, before.formation) != own or not _has_same_pages(before, runtime, group):
        return None
    scheduler = runtime.mode_of(group).scheduler
    if scheduler is None:
        return ManifestChanges(rank, draft, (), (), (), before.written)
    states = [each.state for each in before.cargo]
    found = scheduler.progress_since(states, before.chains)
    if found is None:
        return None
    tasks, emitted, progress = [], [], []
    for place, (cargo, each) in enumerate(zip(before.cargo, found, strict=True)):
        led = runtime.book.get(TaskId(cargo.state.task))
        if each is None or led is None:
            continue
        if led.attempt != cargo.attempt:
            return None
        tasks.append(place)
        emitted.append(led.emitted)
        progress.append(each)
    return ManifestChanges(rank, draft, tasks, emitted, progress, scheduler.written_blocks())


def _has_same_pages(before: Manifest, runtime: Runtime, group: Group) -> bool:
    """Return whether this rank's pages, and those of the group that it has left, are as before."""
    pool, table = runtime.engine.pages, runtime.mode_of(group).table
    pages = pool.own_pages() if group.width == 1 else pool.lease_of(group.lease_key)[1]
    keys = pool.groups()
    return (
        before.num_pages == runtime.engine.kv.num_pages
        and np.array_equal(before.pages, np.sort(pages))
        and np.array_equal(before.free, pool.free_pages())
        and before.indices.keys() == set(keys)
        and all(np.array_equal(before.indices[key], pool.lease_indices(key)) for key in keys)
        and (table is None or np.array_equal(before.slots, table.all_slots()))
    )

"""Builds the manifest of a rank that has left a group for a migration."""

import numpy as np

from comm_pool.layout import Group, Rank
from coordinator.protocol.terms import TaskId
from worker.rank.migration.manifest import Manifest, TaskSnapshot
from worker.rank.runtime_protocol import Runtime
from worker.rank.task_state import CachedChain

CACHED_BYTES_MAX = 4 << 30
"""KV of finished requests that one leader offers to carry: about 10 ms over NVLink."""

_NO_PAGES = np.zeros(0, dtype=np.int64)
_NO_SLOTS = np.zeros(0, dtype=np.int32)


def nothing_of(manifest: Manifest) -> Manifest:
    """Return the same manifest without a group and its tasks."""
    own = manifest.free, manifest.indices, manifest.num_pages
    return Manifest(manifest.rank, (), -1, _NO_PAGES, _NO_SLOTS, *own)


def manifest_of(runtime: Runtime, rank: Rank, group: Group | None, formation: int) -> Manifest:
    """Return the manifest of this rank and of the group that it has left, if any."""
    pool = runtime.engine.pages
    free, num_pages = pool.free_pages(), runtime.engine.kv.num_pages
    indices = {ranks: pool.lease_indices(ranks) for ranks in pool.groups()}
    if group is None:
        return Manifest(rank, (), -1, _NO_PAGES, _NO_SLOTS, free, indices, num_pages)
    mode = runtime.mode_of(group)
    pages = pool.own_pages() if group.width == 1 else pool.lease_of(group.ranks)[1]
    slots = mode.table.all_slots() if mode.table is not None else _NO_SLOTS
    cargo: tuple[TaskSnapshot, ...] = ()
    chains: tuple[CachedChain, ...] = ()
    written = _NO_PAGES
    if mode.scheduler is not None:
        page_bytes = runtime.engine.kv.geometry.page_bytes // group.width
        states, found = mode.scheduler.movable(CACHED_BYTES_MAX // page_bytes)
        led = [(runtime.book.get(TaskId(state.task)), state) for state in states]
        cargo = tuple(
            TaskSnapshot(each.header, each.attempt, each.emitted, each.payload, state)
            for each, state in led
            if each is not None
        )
        chains = tuple(found)
        written = mode.scheduler.written_blocks()
    ranks = tuple(int(each) for each in group.ranks)
    own = free, indices, num_pages
    return Manifest(rank, ranks, formation, np.sort(pages), slots, *own, cargo, chains, written)

"""What every rank publishes before a migration, and the plan that all of them derive from it.

Pure: the same manifests give the same plan on every rank. A group takes part with its tasks only if
all its members are present and left the same formation. Tasks that cannot migrate stay out of the
plan, and their leader has them recomputed. `manifest_of` only reads the rank's runtime.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from comm_pool.layout import Group, Rank, lease_key
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, Target, TaskId
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.reshard.blocks import joined, pieces
from kvadaptor.reshard.order import order_of
from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import (
    Carried,
    Chain,
    EarlyBlocks,
    NewGroup,
    OldGroup,
    ReshardInput,
    ReshardPlan,
)
from worker.rank.migration.early_copy import EarlyCopy, Packed, packed, true_blocks, unpacked
from worker.rank.migration.lease_indices import fresh_indices, renumbered
from worker.rank.runtime_protocol import Runtime
from worker.rank.task_state import CachedChain, RunningState

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Ranks = tuple[int, ...]

CACHED_BYTES_MAX = 4 << 30
"""KV of finished requests that one leader offers to carry: about 10 ms over NVLink."""

_NO_PAGES = np.zeros(0, dtype=np.int64)
_NO_SLOTS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TaskSnapshot:
    """A running task with all that its next leader needs; `emitted` tokens have been sent."""

    header: TaskHeader
    attempt: int
    emitted: int
    payload: bytes
    state: RunningState


class LateTokens(NamedTuple):
    """Tokens from the step that was in flight when the leader published the task."""

    tokens: tuple[int, ...]
    emitted: int
    """Tokens sent since the task began."""


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """One rank's part: the group it left (`ranks` empty: none), its pages there and elsewhere.

    `pages` are all pages that this rank gave the group, `slots` the slot of each logical block on
    this rank (wide groups; int32). `indices` are the lease indices in use, by lease. `num_pages`
    counts all pages of the rank, page 0 included: ranks may have different numbers. Only the leader
    fills the rest. `written` are the logical blocks that the in-flight step writes, of
    running and of ended tasks. Every rank fills `early`, `stages`, the group's pipeline stages, and
    `draft`: the round in which it has drafted the plan, 0 if it has not.
    """

    rank: int
    ranks: Ranks
    formation: int
    pages: Ints
    slots: npt.NDArray[np.int32]
    free: Ints
    indices: Mapping[Ranks, Ints]
    num_pages: int
    cargo: tuple[TaskSnapshot, ...] = ()
    chains: tuple[CachedChain, ...] = ()
    written: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    early: tuple[EarlyCopy, ...] = ()
    stages: int = 1
    draft: int = 0

    def __reduce__(self) -> Any:
        """Pack the blocks of all tasks into one array, and those of early copies into another.

        200 small ones cost 2 ms at each end.
        """
        bare = tuple(_without_blocks(each) for each in self.cargo)
        blocks = [each.state.blocks for each in self.cargo]
        sizes = [each.size for each in blocks]
        own = self.free, self.indices, self.num_pages
        rest = self.rank, self.ranks, self.formation, self.pages, self.slots, *own
        more = self.chains, self.written, packed(self.early), self.stages, self.draft
        return _unpacked, (rest, bare, joined(blocks), sizes, *more)


_Bare = tuple[
    tuple[TaskHeader, int, int, bytes],
    tuple[str, bytes, int, int, int],
    tuple[list[bytes], Any, int, list[int], int],
]
"""The fields of a `TaskSnapshot`: before its state, and of its state around the blocks."""


def _without_blocks(cargo: TaskSnapshot) -> _Bare:
    state = cargo.state
    return (
        (cargo.header, cargo.attempt, cargo.emitted, cargo.payload),
        (state.task, state.generated, state.count, state.computed, state.settled),
        (state.hashes, state.prefill_stats, state.preemptions, state.since, state.priority),
    )


def _unpacked(
    rest: tuple[int, Ranks, int, Ints, npt.NDArray[np.int32], Ints, Mapping[Ranks, Ints], int],
    bare: Iterable[_Bare],
    blocks: Ints,
    sizes: Sequence[int],
    chains: tuple[CachedChain, ...],
    written: Ints,
    early: Packed,
    stages: int,
    draft: int,
) -> Manifest:
    """Rebuild the manifest that `Manifest.__reduce__` packed."""
    cargo = tuple(
        TaskSnapshot(*fields, RunningState(*head, own, *tail))
        for (fields, head, tail), own in zip(bare, pieces(blocks, sizes), strict=True)
    )
    return Manifest(*rest, cargo, chains, written, unpacked(early), stages, draft)


def nothing_of(manifest: Manifest) -> Manifest:
    """Return the same manifest without a group and its tasks."""
    own = manifest.free, manifest.indices, manifest.num_pages
    return Manifest(manifest.rank, (), -1, _NO_PAGES, _NO_SLOTS, *own)


def manifest_of(
    runtime: Runtime,
    rank: Rank,
    group: Group | None,
    formation: int,
    early: tuple[EarlyCopy, ...] = (),
    *,
    draft: int = 0,
    is_serving: bool = False,
) -> Manifest:
    """Return the manifest of this rank and of the group that it has left, if any.

    A group that `is_serving` has not been left yet: its manifest has what early copies need.
    """
    pool = runtime.engine.pages
    free, num_pages = pool.free_pages(), runtime.engine.kv.num_pages
    indices = {key: pool.lease_indices(key) for key in pool.groups()}
    if group is None:
        return Manifest(rank, (), -1, _NO_PAGES, _NO_SLOTS, free, indices, num_pages)
    mode = runtime.mode_of(group)
    pages = pool.own_pages() if group.width == 1 else pool.lease_of(group.lease_key)[1]
    slots = mode.table.all_slots() if mode.table is not None else _NO_SLOTS
    cargo: tuple[TaskSnapshot, ...] = ()
    chains: tuple[CachedChain, ...] = ()
    written = _NO_PAGES
    if mode.scheduler is not None:
        page_bytes = runtime.engine.kv.geometry.page_bytes // group.width
        states, found = mode.scheduler.movable(0 if is_serving else CACHED_BYTES_MAX // page_bytes)
        led = [(runtime.book.get(TaskId(state.task)), state) for state in states]
        cargo = tuple(
            TaskSnapshot(each.header, each.attempt, each.emitted, each.payload, state)
            for each, state in led
            if each is not None
        )
        chains = tuple(found)
        written = mode.scheduler.written_blocks()
    ranks = tuple(int(each) for each in group.ranks)
    more = np.sort(pages), slots, free, indices, num_pages
    of_leader = cargo, chains, written, early
    return Manifest(rank, ranks, formation, *more, *of_leader, group.stages, draft)


@dataclass(frozen=True, slots=True, eq=False)
class MigrationPlan:
    """The plan of one component; `bindings` are in the order of `plan.groups`."""

    ranks: Ranks
    bindings: tuple[Binding, ...]
    plan: ReshardPlan
    indices: tuple[Ints, ...]
    """Lease indices of each wide group's new pages, in order of the plan's 1..n; empty in dp."""
    cargo: Mapping[str, tuple[int, TaskSnapshot]]
    """Task -> its old leader and its snapshot."""
    chains: Mapping[str, CachedChain]
    old_groups: tuple[Ranks, ...]
    """The old groups that take part."""
    spoils_from: int | None
    """The first round that overwrites KV of the old groups; None if no round does."""
    written: Mapping[int, Bools]
    """Rank -> mask of its units that in-flight steps write; ranks without any are absent."""

    @property
    def may_begin_early(self) -> bool:
        """Whether round 1 may begin beside in-flight steps, where these do not write."""
        return self.spoils_from != 1

    @property
    def may_end_late(self) -> bool:
        """Whether copies may be in flight at the commit and the joins that follow.

        Each copy must stay within one wide group. There, writes to pages follow a collective that
        waits for all members' copies, and a member that cannot finish takes the group down with it.
        """
        wide = [set(each.group.ranks) for each in self.bindings if each.group.width > 1]
        stay = all(
            any(group.issuperset((each.dst_rank, *_ranks_in(each.src_ranks))) for group in wide)
            for each in self.plan.copies
        )
        return self.plan.rounds == 1 and self.spoils_from is None and stay

    def pages_taken(self, rank: int) -> int:
        """Return how many pages of a rank belong to its new group after the migration."""
        groups = zip(self.plan.groups, self.bindings, strict=True)
        mine = ((each.group.ranks, lease.pages) for lease, each in groups)
        return sum(len(pages[ranks.index(rank)]) for ranks, pages in mine if rank in ranks)

    def blocks(self, chains: Sequence[Carried]) -> list[Ints]:
        """Return the logical blocks of one new group's chains as that group numbers them."""
        number = chains[0].group if chains else 0
        found = joined(each.blocks for each in chains)
        if found.size:
            found = renumbered(found, self.bindings[number], self.indices[number])
        return pieces(found, [each.blocks.size for each in chains])


def _ranks_in(ranks: Ints) -> list[int]:
    found: list[int] = np.flatnonzero(np.bincount(ranks)).tolist()
    return found


def _used_indices(key: Ranks, manifests: Mapping[int, Manifest]) -> list[Ints]:
    used = (manifests[member].indices.get(key) for member in key if member in manifests)
    return [each for each in used if each is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """The part of a migration that contains one rank; `given` is None without a new group."""

    ranks: Ranks
    bindings: tuple[Binding, ...]
    groups: tuple[Ranks, ...]
    cargo: Mapping[str, tuple[int, TaskSnapshot]]
    chains: Mapping[str, CachedChain]
    given: ReshardInput | None


def plan_move(
    rank: int,
    manifests: Mapping[int, Manifest],
    target: Target,
    geometry: PageGeometry,
) -> MigrationPlan:
    """Plan the migration of the component that contains `rank`; without a new group nothing moves.

    A rank that joined before a migration was wanted takes no part, so its group takes none either.
    """
    found = component_of(rank, manifests, target, geometry)
    ranks, groups, given = found.ranks, found.groups, found.given
    if given is None:
        plan = ReshardPlan(Split(1, 1), 0, (), (), (), (), (), 0)
        return MigrationPlan(ranks, (), plan, (), {}, {}, groups, None, {})
    plan = plan_reshard(given)
    old_keys = {lease_key(tuple(map(Rank, old.ranks)), old.stages) for old in given.old}
    keys = (binding.group.lease_key for binding in found.bindings)
    indices = tuple(
        fresh_indices(
            lease.indices if lease.width > 1 else 0,
            # An old group gives up its lease before the new lease is taken.
            () if key in old_keys else _used_indices(key, manifests),
            min(manifests[member].num_pages for member in lease.ranks),
        )
        for lease, key in zip(plan.groups, keys, strict=True)
    )
    spoils_from = _spoils_from(plan, given)
    written = written_units(plan.finest, groups, manifests)
    bindings, cargo, chains = found.bindings, found.cargo, found.chains
    return MigrationPlan(
        ranks, bindings, plan, indices, cargo, chains, groups, spoils_from, written
    )


def component_of(
    rank: int,
    manifests: Mapping[int, Manifest],
    target: Target,
    geometry: PageGeometry,
    *,
    is_serving: bool = False,
) -> Component:
    """Return the component of a rank, from manifests of groups that were left or are serving."""
    whole = whole_groups(manifests)
    newest = newest_attempts(manifests[group[0]] for group in whole)
    ranks, mine, groups = groups_around(rank, manifests, target)
    if not mine:
        return Component(ranks, (), groups, {}, {}, None)
    alone = sorted(set(ranks).difference(*groups))
    cargo: dict[str, tuple[int, TaskSnapshot]] = {}
    chains: dict[str, CachedChain] = {}
    tokens = geometry.tokens_per_slot
    old = [
        _old_group(group, manifests, cargo, chains, tokens, newest, is_serving=is_serving)
        for group in groups
    ]
    old += [OldGroup((each,)) for each in alone]
    reserved = dict(target.reserved)
    early = true_blocks(
        {each: manifests[each].early for each in ranks},
        {int(member): each.group.width for each in mine for member in each.group.ranks},
        {name: (leader, each.attempt, each.state) for name, (leader, each) in cargo.items()},
        {chain.id: chain.size for group in old for chain in group.chains},
    )
    given = ReshardInput(
        num_kv_heads=geometry.num_kv_heads,
        num_pages={each: manifests[each].num_pages for each in ranks},
        old=tuple(sorted(old, key=lambda group: group.ranks)),
        new=tuple(
            NewGroup(each.group.ranks, reserved.get(each.group.leader, 0), each.group.stages)
            for each in mine
        ),
        free={each: _free(manifests, each, old, mine, early) for each in ranks},
        early=early,
        num_layers=geometry.num_layers,
    )
    return Component(ranks, mine, groups, cargo, chains, given)


def groups_around(
    rank: int, manifests: Mapping[int, Manifest], target: Target
) -> tuple[Ranks, tuple[Binding, ...], tuple[Ranks, ...]]:
    """Return the ranks of a rank's component, their new groups, and their old ones."""
    whole = whole_groups(manifests)
    bindings = [each for each in target.bindings if set(each.group.ranks) <= manifests.keys()]
    ranks = _component(rank, [*whole, *(tuple(each.group.ranks) for each in bindings)])
    mine = tuple(each for each in bindings if set(each.group.ranks) <= set(ranks))
    return ranks, mine, tuple(group for group in whole if set(group) <= set(ranks))


def written_units(
    finest: Split, groups: Iterable[Ranks], manifests: Mapping[int, Manifest]
) -> dict[int, Bools]:
    """See `MigrationPlan`."""
    return units_of({group: manifests[group[0]].written for group in groups}, finest, manifests)


def units_of(
    blocks_of: Mapping[Ranks, Ints], finest: Split, manifests: Mapping[int, Manifest]
) -> dict[int, Bools]:
    """Return masks of the units that hold these (m,) blocks of groups, by rank, if any do."""
    found: dict[int, Bools] = {}
    for group, blocks in blocks_of.items():
        if not blocks.size:
            continue
        stages = manifests[group[0]].stages
        order = order_of(Split(stages, len(group) // stages), finest)
        for rank, slots in zip(group, slots_of(blocks, group, manifests), strict=True):
            found[rank] = np.zeros(manifests[rank].num_pages * finest.width, dtype=np.bool_)
            order.mark(found[rank], slots)
    return found


def slots_of(blocks: Ints, group: Ranks, manifests: Mapping[int, Manifest]) -> list[Ints]:
    """Return (k, m): the slots on each member of a group that hold these (m,) blocks."""
    if len(group) == 1:
        return [blocks]
    return [manifests[member].slots[blocks].astype(np.int64) for member in group]


def _spoils_from(plan: ReshardPlan, given: ReshardInput) -> int | None:
    """See `MigrationPlan`. Blocks that stay, or that have several copies, may be overwritten."""
    held: dict[int, npt.NDArray[np.bool_]] = {}
    for group in given.old:
        order = order_of(group.split, plan.finest)
        for place, rank in enumerate(group.ranks):
            held[rank] = np.zeros(given.num_pages[rank] * plan.units, dtype=np.bool_)
            order.mark(held[rank], joined(chain.slots[place] for chain in group.chains))
    rounds = [each.round for each in plan.copies if held[each.dst_rank][each.dst_units].any()]
    return min(rounds, default=None)


def whole_groups(manifests: Mapping[int, Manifest]) -> list[Ranks]:
    """Return the groups whose members all left the same formation."""
    groups = {each.ranks for each in manifests.values() if each.ranks}
    return sorted(
        group
        for group in groups
        if all(
            member in manifests
            and manifests[member].ranks == group
            and manifests[member].formation == manifests[group[0]].formation
            for member in group
        )
    )


def newest_attempts(leaders: Iterable[Manifest]) -> dict[str, int]:
    """Return each task's newest attempt: a rank ejected unaware may list an older one."""
    newest: dict[str, int] = {}
    for each in (cargo for leader in leaders for cargo in leader.cargo):
        newest[each.state.task] = max(each.attempt, newest.get(each.state.task, 0))
    return newest


def _component(rank: int, groups: Iterable[Ranks]) -> Ranks:
    """Return the ranks linked by shared groups; aligned groups nest, so the widest has all."""
    own = [group for group in groups if rank in group]
    return max(own, key=len) if own else (rank,)


def _old_group(
    group: Ranks,
    manifests: Mapping[int, Manifest],
    cargo: dict[str, tuple[int, TaskSnapshot]],
    chains: dict[str, CachedChain],
    block_tokens: int,
    newest: Mapping[str, int],
    *,
    is_serving: bool = False,
) -> OldGroup:
    """Return a group with its chains; one that `is_serving` has those of full blocks alone.

    These have no keys: another task may give up an equal block at any time.
    """
    leader = manifests[group[0]]
    running = [each for each in leader.cargo if each.attempt >= newest[each.state.task]]
    blocks = [each.state.blocks for each in running]
    if is_serving:
        settled = [each.state.full_blocks(block_tokens, leader.written) for each in running]
        running = [each for each, own in zip(running, settled, strict=True) if own.size]
        blocks = [own for own in settled if own.size]
    blocks += [each.blocks for each in leader.chains]
    numbers = joined(blocks)
    tables = [manifests[member].slots for member in group]
    rows = [numbers] if len(group) == 1 else [table[numbers] for table in tables]
    slots = iter(pieces(np.stack(rows).astype(np.int64), [each.size for each in blocks]))
    made: list[Chain] = []
    for each in running:
        cargo[each.state.task] = (leader.rank, each)
        # A block that is not full will be written to, so it cannot be shared.
        full = [] if is_serving else each.state.hashes[: each.state.computed // block_tokens]
        keys = (*full, *((None,) * (each.state.blocks.size - len(full)))) if full else ()
        tier = int(each.header.tier)
        made.append(Chain(each.state.task, next(slots), tier=tier, keys=keys))
    for number, chain in enumerate(leader.chains):
        name = f"cached/{leader.rank}/{number}"
        chains[name] = chain
        recency = len(leader.chains) - number
        hashes = tuple(chain.hashes)
        made.append(Chain(name, next(slots), cached=True, recency=recency, keys=hashes))
    return OldGroup(group, tuple(made), leader.stages)


def _free(
    manifests: Mapping[int, Manifest],
    rank: int,
    old: Iterable[OldGroup],
    bindings: Iterable[Binding],
    early: Iterable[EarlyBlocks],
) -> Ints:
    """Return pages that a migration may use on this rank: free ones, or the old group's unused.

    Pages that an in-flight step writes are excluded, and those of early copies.
    """
    pages = _free_pages(manifests, rank, old)
    width_of = {int(member): each.group.width for each in bindings for member in each.group.ranks}
    held = [each.slots // width_of[rank] for each in early if each.rank == rank]
    return pages[~np.isin(pages, joined(held))] if held else pages


def _free_pages(manifests: Mapping[int, Manifest], rank: int, old: Iterable[OldGroup]) -> Ints:
    manifest = manifests[rank]
    for group in old:
        if rank in group.ranks and manifest.ranks == group.ranks:
            place, width = group.ranks.index(rank), len(group.ranks)
            is_free = np.zeros(manifest.num_pages, dtype=np.bool_)
            is_free[manifest.free] = is_free[manifest.pages] = True
            is_free[joined(chain.slots[place] for chain in group.chains) // width] = False
            written = slots_of(manifests[group.ranks[0]].written, group.ranks, manifests)
            is_free[written[place] // width] = False
            return np.flatnonzero(is_free)
    return manifest.free

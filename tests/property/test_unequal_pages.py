"""Migrations between ranks with different numbers of pages, from memories of random fill.

Every rank plans by itself. All plans agree, stay within each rank's own pages, and their pages fit
the ranks' real accounting: `PagePool` and `SlotTable` take them as the worker does.
"""

import pickle
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, Target, TaskId, Tier
from kvadaptor.geometry import PageGeometry
from kvadaptor.pages import PagePool
from kvadaptor.slot_table import SlotTable
from worker.rank.migration.manifest import Manifest, MigrationPlan, TaskSnapshot, plan_move
from worker.rank.task_state import RunningState

BLOCK = 16
GEOMETRY = PageGeometry(1, 4, 8, 8, 4, BLOCK)
FORMATION = 3
Tiling = tuple[tuple[int, ...], ...]
TILINGS: dict[int, tuple[Tiling, ...]] = {
    2: (((0, 1),), ((0,), (1,))),
    4: (
        ((0, 1, 2, 3),),
        ((0, 1), (2, 3)),
        ((0, 1), (2,), (3,)),
        ((0,), (1,), (2, 3)),
        ((0,), (1,), (2,), (3,)),
    ),
}


@dataclass
class Memory:
    """A rank's real page accounting, with tables of the groups that it may be in."""

    num_pages: int
    pool: PagePool = field(init=False)
    tables: dict[tuple[int, ...], SlotTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages)

    def table(self, ranks: tuple[int, ...]) -> SlotTable:
        return self.tables.setdefault(ranks, SlotTable(self.num_pages, len(ranks)))


def cargo(name: str, blocks: list[int], draw: random.Random) -> TaskSnapshot:
    header = TaskHeader(TaskId(name), "gateway", "tcp://nowhere", 10, 10, draw.choice(list(Tier)))
    computed = len(blocks) * BLOCK - draw.randrange(BLOCK)
    hashes = [f"{name}/{number}".encode() for number in range(computed // BLOCK)]
    numbers = np.array(blocks, dtype=np.int64)
    state = RunningState(name, b"", 0, computed, computed, numbers, hashes, None)
    return TaskSnapshot(header, 1, 0, b"", state)


def tasks_in(blocks: list[int], leader: int, draw: random.Random) -> tuple[TaskSnapshot, ...]:
    """Tasks that use some of these logical blocks, in any order."""
    draw.shuffle(blocks)
    made: list[TaskSnapshot] = []
    while blocks and len(made) < 5:
        size = draw.randint(1, len(blocks))
        made.append(cargo(f"task {leader}.{len(made)}", blocks[:size], draw))
        del blocks[: size + draw.randrange(3)]
    return tuple(made)


def paused_leases(
    memories: dict[int, Memory], groups: Tiling, fill: float, draw: random.Random
) -> None:
    """Let paused tasks of other groups hold some pages, alike on all members."""
    for ranks in groups:
        if len(ranks) > 1:
            least = min(memories[rank].pool.counts().free for rank in ranks)
            count = round(least * fill * draw.random())
            for rank in ranks:
                memories[rank].pool.lease_pages(ranks, count)


def left(
    memories: dict[int, Memory], ranks: tuple[int, ...], draw: random.Random
) -> dict[int, Manifest]:
    """What the members of a group publish that holds all pages that it could get."""
    width = len(ranks)
    granted = min(memories[rank].pool.counts().free for rank in ranks)
    made: dict[int, Manifest] = {}
    led: tuple[TaskSnapshot, ...] = ()
    for rank in ranks:
        memory = memories[rank]
        pool = memory.pool
        if width == 1:
            pages, slots = pool.grant_own_pages(granted), np.zeros(0, dtype=np.int32)
            blocks = pages.tolist()
        else:
            indices, pages = pool.lease_pages(ranks, granted)
            memory.table(ranks).map(*pool.lease_of(ranks))
            slots = memory.table(ranks).all_slots()
            blocks = (indices[:, None] * width + np.arange(width)).reshape(-1).tolist()
        if rank == ranks[0]:
            led = tasks_in(blocks, rank, draw)
        held = {each: pool.lease_indices(each) for each in pool.groups()}
        pages = pool.own_pages() if width == 1 else pool.lease_of(ranks)[1]
        own = (np.sort(pages), slots, pool.free_pages(), held, memory.num_pages)
        made[rank] = Manifest(rank, ranks, FORMATION, *own, led if rank == ranks[0] else ())
    return made


def target(groups: Tiling) -> Target:
    modes = [Mode.DP if len(ranks) == 1 else Mode.TP for ranks in groups]
    made = [Group(tuple(map(Rank, ranks)), mode) for ranks, mode in zip(groups, modes, strict=True)]
    return Target(tuple(Binding(group, FORMATION + 1) for group in made))


def carry_out(move: MigrationPlan, manifest: Manifest, memory: Memory) -> None:
    """Give up the old group and take the new one's pages, as `Migration` does on a commit."""
    rank, pool = manifest.rank, memory.pool
    if len(manifest.ranks) == 1:
        pool.keep_own(np.zeros(0, dtype=np.int64))
    else:
        pool.keep_only(manifest.ranks, ())
    for lease, indices in zip(move.plan.groups, move.indices, strict=True):
        if rank not in lease.ranks:
            continue
        place, width = lease.ranks.index(rank), lease.width
        if width == 1:
            pool.own_these(lease.pages[0])
            continue
        pool.lease_these(lease.ranks, indices, lease.pages[place])
        blocks = np.arange(width, width * (indices.size + 1))
        logical = width * indices[blocks // width - 1] + blocks % width
        memory.table(lease.ranks).assign(logical, lease.table[place][blocks])
        slots = memory.table(lease.ranks).slots(logical.tolist())
        assert sorted(slots) == [
            page * width + slot for page in lease.pages[place].tolist() for slot in range(width)
        ]


@given(
    st.sampled_from([2, 4]).flatmap(
        lambda world: st.tuples(
            st.lists(st.integers(2, 40), min_size=world, max_size=world),
            st.sampled_from([(a, b) for a in TILINGS[world] for b in TILINGS[world] if a != b]),
        )
    ),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_plans_of_unequal_ranks_agree_and_fit(
    cell: tuple[list[int], tuple[Tiling, Tiling]], fill: float, draw: random.Random
) -> None:
    sizes, (old, new) = cell
    memories = {rank: Memory(size) for rank, size in enumerate(sizes)}
    paused_leases(memories, tuple(ranks for ranks in new if ranks not in old), fill, draw)
    manifests: dict[int, Manifest] = {}
    for ranks in old:
        manifests |= left(memories, ranks, draw)
    # Each rank reads what the others have published.
    published = {rank: pickle.dumps(each, protocol=5) for rank, each in manifests.items()}
    plans = {
        rank: plan_move(
            rank,
            {each: pickle.loads(message) for each, message in published.items()},
            target(new),
            GEOMETRY,
        )
        for rank in manifests
    }
    for rank, move in plans.items():
        first = plans[move.ranks[0]]
        assert repr(move) == repr(first), "two ranks plan differently"
        for copies in move.plan.copies:
            units = move.plan.units
            assert copies.dst_units.max() < sizes[copies.dst_rank] * units
            for source, unit in zip(copies.src_ranks, copies.src_units, strict=True):
                assert unit < sizes[source] * units
        known = {each.id for each in move.plan.carried} | {each.id for each in move.plan.fallbacks}
        assert known == set(move.cargo), "a task is lost"
        before = memories[rank].pool.counts()
        carry_out(move, manifests[rank], memories[rank])
        memories[rank].pool.integrity(full=True)
        after = memories[rank].pool.counts()
        own = before.owned if len(manifests[rank].ranks) == 1 else 0
        given_up = own or before.leased.get(manifests[rank].ranks, 0)
        assert after.free == before.free + given_up - move.pages_taken(rank)

"""Places blocks into slots of the new width, round by round, until all are placed.

Every member fills its slots independently, because a table per member maps logical blocks to slots.
Rounds are needed because a unit can only be overwritten after every rank that needs it has read it.
In each round a member first keeps blocks that are already in place. It then fills vacant slots in
the order of the blocks, so that all members vacate the same pages. Terms: `reshard.terms`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvadaptor.reshard.blocks import Blocks
from kvadaptor.reshard.order import Bools, UnitOrder
from kvadaptor.reshard.terms import Ints, UnitCopies

Counts = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """The blocks that one new group must hold: its ranks and block numbers, ascending.

    `order` is the group's. `turns` (B,) is the order in which blocks move if not all can move at
    once.
    """

    ranks: tuple[int, ...]
    order: UnitOrder
    blocks: Ints
    turns: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The places of the blocks of one new group.

    `slots` is (k, B), `pages` (k, n) ascending, `moved` (B,) is whether any unit was copied.
    """

    slots: Ints
    pages: Ints
    moved: Bools


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """All blocks placed, one entry per `Need`."""

    placed: tuple[Placed, ...]
    copies: tuple[UnitCopies, ...]
    rounds: int
    in_place_units: int


@dataclass(slots=True, eq=False)
class _Member:
    """One rank of a new group; slots and pages here are indices into its candidate pages.

    `source` is (w, B): the flat unit of each fragment that it needs, `right` whether it lies on
    this rank at the right offset of slot `home` (B,), or of none: -1, `slot` (B,) the slot given or
    -1. `touched` are pages that have a block. `spared`, if some blocks are early, are the slots
    with KV of old groups: they are filled last, as nobody may read them any more.
    """

    rank: int
    order: UnitOrder
    width: int
    budget: int
    pages: Ints
    source: Ints
    right: Bools
    home: Ints
    turn: Ints
    spared: Bools | None = None
    slot: Ints = field(init=False)
    taken: Bools = field(init=False)
    touched: Bools = field(init=False)

    def __post_init__(self) -> None:
        self.slot = np.full(self.home.size, -1, dtype=np.int64)
        self.taken = np.zeros(self.pages.size * self.width, dtype=np.bool_)
        self.touched = np.zeros(self.pages.size, dtype=np.bool_)

    def fill(self, reads: Counts) -> Ints:
        """Give slots to as many pending blocks as possible now; return these blocks.

        `reads` is (M, U): how often each unit of this rank is still to be read.
        """
        pending = np.flatnonzero(self.slot < 0)
        if not pending.size:
            return pending
        unread = self.order.by_slot(reads[self.pages] > 0)
        busy = unread[:, 0].astype(np.int64) if unread.shape[1] == 1 else unread.sum(axis=1)
        at_home = pending[self.home[pending] >= 0]
        own = self.right[:, at_home].sum(axis=0)
        at_home = at_home[busy[self.home[at_home]] == own]
        vacant = (busy == 0) & ~self.taken
        in_place = self._keep(at_home, pending.size, vacant)
        rest = pending[self.slot[pending] < 0]
        placed: list[Ints] = []
        for part in (vacant,) if self.spared is None else (vacant & ~self.spared, vacant):
            order = self._open(part & ~self.taken)[: rest.size]
            if rest.size > order.size:
                rest = rest[np.argsort(self.turn[rest], kind="stable")]
            now, rest = rest[: order.size], rest[order.size :]
            self.slot[now] = order
            self.taken[order] = True
            self.touched[order // self.width] = True
            placed.append(now)
        return np.concatenate((in_place, *placed))

    def _keep(self, at_home: Ints, pending: int, vacant: Bools) -> Ints:
        """Keep blocks in place, in as many pages as leave room for the others."""
        page = self.home[at_home] // self.width
        count = np.bincount(page, minlength=self.pages.size)
        settled = int(count[self.touched].sum())
        count[self.touched] = 0
        room = self.budget - int(np.count_nonzero(self.touched))
        full = np.flatnonzero(count)
        full = full[np.argsort(-count[full], kind="stable")][:room]
        holes = vacant.reshape(-1, self.width).sum(axis=1)
        empty = int(np.count_nonzero((holes == self.width) & ~self.touched))
        # For x = 0, 1, ... kept pages, fullest first: the blocks left to place, and the pages left.
        gain = np.concatenate(([0], np.cumsum(count[full] + holes[full])))
        rest = pending - settled - int(holes[self.touched].sum()) - gain
        fresh = -(-np.maximum(rest, 0) // self.width)
        done_now = np.flatnonzero((fresh <= empty) & (fresh + np.arange(fresh.size) <= room))
        keep = int(done_now[-1]) if done_now.size else max(0, room - empty)
        allowed = self.touched.copy()
        allowed[full[:keep]] = True
        in_place = at_home[allowed[page]]
        slots = self.home[in_place]
        self.slot[in_place] = slots
        self.taken[slots] = True
        vacant[slots] = False
        self.touched[slots // self.width] = True
        return in_place

    def _open(self, vacant: Bools) -> Ints:
        """Return the vacant slots in the order to fill them, within the budget of pages."""
        by_page = vacant.reshape(-1, self.width)
        holes = by_page.sum(axis=1)
        fresh = np.flatnonzero((holes > 0) & ~self.touched)
        if self.width > 1:
            fresh = fresh[np.argsort(-holes[fresh], kind="stable")]
        room = self.budget - int(np.count_nonzero(self.touched))
        pages = np.concatenate((np.flatnonzero(self.touched & (holes > 0)), fresh[:room]))
        at = np.flatnonzero(by_page[pages])
        slots: Ints = pages[at // self.width] * self.width + at % self.width
        return slots

    def physical(self, slots: Ints) -> Ints:
        """Convert slot indices to slot numbers."""
        numbers: Ints = self.pages[slots // self.width] * self.width + slots % self.width
        return numbers


def place(blocks: Blocks, needs: Sequence[Need], rounds_max: int) -> Outcome | None:
    """Place every block of every new group; None if there are too few rounds or pages."""
    size = (blocks.num_ranks, blocks.num_pages, blocks.units)
    reads: Counts = np.zeros(size, dtype=np.int16)
    flat_reads = reads.reshape(-1)
    groups: list[list[_Member]] = []
    for need in needs:
        members = _members(blocks, need)
        if members is None:
            return None
        groups.append(members)
        for member in members:
            flat_reads[member.source] += 1
    members = [member for group in groups for member in group]
    copies: list[UnitCopies] = []
    in_place = rounds = 0
    while any((member.slot < 0).any() for member in members):
        done = [(member, member.fill(reads[member.rank])) for member in members]
        if not any(given.size for _, given in done):
            return None
        # Only now, as all copies of a round run at once: units that it reads are not yet vacant.
        this_round = []
        for member, given in done:
            flat_reads[member.source[:, given]] -= 1
            copied, stays = _copies(blocks, member, given, rounds + 1)
            in_place += stays
            if copied is not None:
                this_round.append(copied)
        if this_round:
            rounds += 1
            copies += sorted(this_round, key=lambda each: each.dst_rank)
        if rounds > rounds_max:
            return None
    placed = [_settle(blocks, group) for group in groups]
    return Outcome(tuple(placed), tuple(copies), rounds, in_place)


def _members(blocks: Blocks, need: Need) -> list[_Member] | None:
    width, lead = len(need.ranks), need.ranks[0] - blocks.first
    budget = int(blocks.touchable[lead : lead + width].sum(axis=1).min())
    enough = -(-need.blocks.size // width)
    if enough > budget:
        return None
    return [_member(blocks, need, place, budget, enough) for place in range(width)]


def _member(blocks: Blocks, need: Need, place: int, budget: int, enough: int) -> _Member:
    width, order = len(need.ranks), need.order
    rank = need.ranks[place] - blocks.first
    # More free pages than the blocks fill are of no use here, and memory may be large.
    free = np.flatnonzero(blocks.touchable[rank] & ~blocks.used[rank])[:enough]
    candidate = blocks.used[rank].copy()
    candidate[free] = True
    pages = np.flatnonzero(candidate)
    index_of = np.full(blocks.num_pages, -1, dtype=np.int64)
    index_of[pages] = np.arange(pages.size)
    source = blocks.source[order.fragments(place)][:, need.blocks]
    rank_units = blocks.num_pages * blocks.units
    if (early := blocks.early.get(rank)) is not None:
        numbers, slots = early
        column_of = np.full(blocks.source.shape[1], -1, dtype=np.int64)
        column_of[need.blocks] = np.arange(need.blocks.size)
        column = column_of[numbers]
        source[:, column[column >= 0]] = rank * rank_units + order.units_of(slots[column >= 0])
    unit = source - rank * rank_units
    right = (unit >= 0) & (unit < rank_units)
    if order.per_slot > 1:
        right &= order.offset_of(unit) == np.arange(order.per_slot)[:, np.newaxis]
    # All that lie right are in one slot: an old slot holds a block's fragments as they lie in dp.
    slot = np.where(right, order.slot_of(unit), 0).max(axis=0)
    spared: Bools | None = None
    if blocks.held.size:
        held = blocks.held[rank].reshape(-1, blocks.units)[pages]
        spared = order.by_slot(held).any(axis=1).reshape(-1)
    page = index_of[slot // width]  # the null page has index -1: nothing is at home there
    right &= page >= 0
    return _Member(
        rank=rank,
        order=order,
        width=width,
        budget=budget,
        pages=pages,
        source=source,
        right=right,
        turn=need.turns,
        spared=spared,
        home=np.where(page >= 0, page * width + slot % width, -1),
    )


def _copies(
    blocks: Blocks, member: _Member, given: Ints, number: int
) -> tuple[UnitCopies | None, int]:
    """Return the copies that bring these blocks into their slots, and the units in place."""
    source = member.source[:, given]
    slot = member.slot[given]
    stays = member.right[:, given] & (slot == member.home[given])
    target = member.order.units_of(member.physical(slot))
    # Block by block, so that a slot's units follow each other.
    copied = ~stays.T.reshape(-1)
    flat_source, flat_target = source.T.reshape(-1)[copied], target.T.reshape(-1)[copied]
    if not flat_source.size:
        return None, stays.size
    rank_units = blocks.num_pages * blocks.units
    rank = flat_source // rank_units
    unit = flat_source - rank * rank_units
    # Mostly sorted already, which a stable sort detects fast.
    order = np.argsort(rank * rank_units + flat_target, kind="stable")
    return UnitCopies(
        round=number,
        dst_rank=member.rank + blocks.first,
        src_ranks=rank[order] + blocks.first,
        src_units=unit[order],
        dst_units=flat_target[order],
    ), stays.size - flat_source.size


def _settle(blocks: Blocks, group: Sequence[_Member]) -> Placed:
    """Give all members equally many pages: the touched ones, then free ones, then vacated ones."""
    count = max(int(np.count_nonzero(member.touched)) for member in group)
    pages = []
    for member in group:
        own = np.zeros(blocks.num_pages, dtype=np.bool_)
        own[member.pages[member.touched]] = True
        used, missing = blocks.used[member.rank], count - int(np.count_nonzero(member.touched))
        for kind in (~used, used) if missing else ():
            spare = np.flatnonzero(blocks.touchable[member.rank] & kind & ~own)[:missing]
            own[spare] = True
            missing -= spare.size
        pages.append(np.flatnonzero(own))
    slots = [member.physical(member.slot) for member in group]
    stays = [(member.slot == member.home) & member.right.all(axis=0) for member in group]
    return Placed(slots=np.stack(slots), pages=np.stack(pages), moved=~np.all(stays, axis=0))

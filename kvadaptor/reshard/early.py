"""What one rank can copy while the old groups still serve, so that less is left for the plan.

Pure. Only blocks that no step writes any more are given. A rank copies each that it will need, and
does not hold as its new group reads it, into a slot that nothing uses. Ranks need not agree: the
plan takes what each of them holds by then. Terms: `reshard.terms`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvadaptor.geometry import Split
from kvadaptor.reshard.assign import share_out, urgency
from kvadaptor.reshard.blocks import Blocks, joined, pieces, read_blocks
from kvadaptor.reshard.order import Bools, UnitOrder
from kvadaptor.reshard.terms import Ints, ReshardInput, UnitCopies


@dataclass(frozen=True, slots=True, eq=False)
class EarlyPlan:
    """The early copies of one rank, most urgent blocks first.

    `finest` is that of a plan, `order` that of the rank's new group. `source_ranks` and
    `source_units` are (n, s): where the s units of each of n blocks are read. They go to the units
    of slot `slots[i]`, in order. `places` are, per chain, the (m,) places of its blocks that are
    copied, and their numbers among the n. `chains` will be those of the rank's new group, if
    nothing changes.
    """

    finest: Split
    order: UnitOrder
    rank: int
    source_ranks: Ints
    source_units: Ints
    slots: Ints
    places: Mapping[str, tuple[Ints, Ints]]
    chains: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of blocks, n."""
        return int(self.slots.size)

    @property
    def units(self) -> int:
        """Units of a page, U."""
        return self.finest.width

    @property
    def width(self) -> int:
        """Ranks of the rank's new group."""
        return self.order.split.width

    def copies(self, first: int, last: int) -> UnitCopies:
        """Return the copies of blocks `first` to `last` - 1."""
        target = self.order.units_of(self.slots[first:last]).T
        ranks = self.source_ranks[first:last].reshape(-1)
        order = np.argsort(ranks, kind="stable")
        return UnitCopies(
            round=1,
            dst_rank=self.rank,
            src_ranks=ranks[order],
            src_units=self.source_units[first:last].reshape(-1)[order],
            dst_units=target.reshape(-1)[order],
        )


def plan_early(given: ReshardInput, rank: int, spare: Ints) -> EarlyPlan:
    """Plan the early copies of a rank into the slots of its `spare` pages, as far as they last.

    `given.early` are the blocks that ranks hold early by now. Chains have no keys: a block of equal
    content may be given up while this chain goes on. Raises `ReshardError` for an invalid input.
    """
    blocks = read_blocks(given)
    tasks = urgency(blocks)
    share = share_out(given, blocks, tasks, ())
    number = next(i for i, group in enumerate(given.new) if rank in group.ranks)
    ranks, order = given.new[number].ranks, blocks.orders[number]
    mine = [task for task in tasks if share.group_of.get(task) == number]
    wanted = _in_order(joined(blocks.numbers[task] for task in mine))
    held, taken = blocks.early.get(rank - blocks.first, (wanted[:0], wanted[:0]))
    source = blocks.source[order.fragments(ranks.index(rank))][:, wanted]
    is_there = _is_at_home(blocks, order, source, rank - blocks.first)
    is_there |= np.isin(wanted, held)
    slots = (spare[:, np.newaxis] * len(ranks) + np.arange(len(ranks))).reshape(-1)
    slots = slots[~np.isin(slots, taken)]
    todo = np.flatnonzero(~is_there)[: slots.size]
    source, rank_units = source[:, todo].T, blocks.num_pages * blocks.units
    position = np.full(blocks.source.shape[1], -1, dtype=np.int64)
    position[wanted[todo]] = np.arange(todo.size)
    return EarlyPlan(
        finest=blocks.finest,
        order=order,
        rank=rank,
        source_ranks=source // rank_units + blocks.first,
        source_units=source % rank_units,
        slots=slots[: todo.size],
        places=_places(blocks, mine, position),
        chains=tuple(blocks.chains[task].id for task in mine),
    )


def _in_order(numbers: Ints) -> Ints:
    """Return the distinct numbers in the order in which they come first."""
    _, first = np.unique(numbers, return_index=True)
    return numbers[np.sort(first)]


def _is_at_home(blocks: Blocks, order: UnitOrder, source: Ints, rank: int) -> Bools:
    """Return, per column, whether a rank, counted from the first, holds all units as one slot."""
    rank_units = blocks.num_pages * blocks.units
    unit = source - rank * rank_units
    is_here: Bools = (unit[0] >= 0) & (unit[0] < rank_units)
    if order.per_slot > 1:
        is_here &= (unit == order.units_of(order.slot_of(unit[0]))).all(axis=0)
    return is_here


def _places(blocks: Blocks, chains: list[int], position: Ints) -> dict[str, tuple[Ints, Ints]]:
    numbers = [blocks.numbers[chain] for chain in chains]
    found: dict[str, tuple[Ints, Ints]] = {}
    at_of = pieces(position[joined(numbers)], [each.size for each in numbers])
    for chain, at in zip(chains, at_of, strict=True):
        places = np.flatnonzero(at >= 0)
        if places.size:
            found[blocks.chains[chain].id] = places, at[places]
    return found

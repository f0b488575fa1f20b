"""The current place of every block of a component: distinct blocks, their units and pages.

Checks the whole input, so that later decisions can rely on it. All work is a few array operations
over all blocks of an old group. Terms: `reshard.terms`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvadaptor.geometry import Split
from kvadaptor.pages import NULL_PAGE
from kvadaptor.reshard.order import Bools, UnitOrder, order_of
from kvadaptor.reshard.terms import Chain, Ints, NewGroup, OldGroup, ReshardError, ReshardInput

_NOTHING: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """All distinct blocks of a component, numbered 0..N-1 by old group and its leader's slot.

    `chains` are all chains in input order, `numbers` their (size,) block numbers; blocks of equal
    content have the same number. M counts the pages of the rank with most, and W the ranks.
    `source` is (U, N): the flat unit `(rank - first)·M·U + unit` from which fragment h of a block
    is best read. `used` and `touchable` are (W, M): the pages per rank that hold a chain's slot,
    and those and the free ones, which may be written and leased. `starts` is the first block number
    of each old group. `orders` are those of the new groups. `early` are the block numbers that a
    rank, counted from the first, holds early, and their slots. `prefers` is the new group of each
    chain with such blocks. `held`, (W, M·U), are the units that hold chains; it is empty if nothing
    is early.
    """

    finest: Split
    first: int
    chains: tuple[Chain, ...]
    numbers: tuple[Ints, ...]
    source: Ints
    used: Bools
    touchable: Bools
    starts: Ints
    orders: tuple[UnitOrder, ...]
    early: Mapping[int, tuple[Ints, Ints]] = field(default_factory=dict)
    prefers: Mapping[int, int] = field(default_factory=dict)
    held: Bools = field(default_factory=lambda: np.zeros((0, 0), dtype=np.bool_))

    @property
    def units(self) -> int:
        """Units of a page, U."""
        return self.finest.width

    @property
    def num_ranks(self) -> int:
        """Ranks of the component, W."""
        return int(self.used.shape[0])

    @property
    def num_pages(self) -> int:
        """M, page 0 included."""
        return int(self.used.shape[1])


def read_blocks(given: ReshardInput) -> Blocks:
    """Check the input and number its blocks; raises `ReshardError`."""
    finest, first = _check_groups(given)
    units, most = finest.width, max(given.num_pages.values())
    size = (len(given.num_pages), most)
    free, used = (np.zeros(size, dtype=np.bool_) for _ in range(2))
    for rank, pages in given.free.items():
        if rank not in given.num_pages:
            raise ReshardError(f"rank {rank} is not in the component.")
        _check_range(pages, given.num_pages[rank], f"a page of rank {rank}")
        free[rank - first, pages] = True
    held = np.zeros((size[0], most * units if given.early else 0), dtype=np.bool_)
    sources: list[Ints] = []
    numbers: list[Ints] = []
    total = 0
    for group in given.old:
        lead, order = group.ranks[0] - first, order_of(group.split, finest)
        pages_of_members = [given.num_pages[rank] for rank in group.ranks]
        distinct, of_chains = _number(group.chains, pages_of_members, total)
        for place, slots in enumerate(distinct):
            used[lead + place, slots // len(group.ranks)] = True
            if given.early:
                order.mark(held[lead + place], slots)
        sources.append(_units_of(distinct, lead, order, most * units))
        numbers += of_chains
        total += distinct.shape[1]
    chains = tuple(chain for group in given.old for chain in group.chains)
    if len({chain.id for chain in chains}) != len(chains):
        raise ReshardError("two chains have the same id.")
    source = np.concatenate(sources, axis=1)
    orders = tuple(order_of(group.split, finest) for group in given.new)
    if any(chain.keys for chain in chains):
        holders = orders[0].holders if len(orders) == 1 else None
        numbers = _merge_equal(chains, numbers, source, holders, most * units)
    early, prefers = _read_early(given, chains, numbers, used, first)
    if (used & free).any():
        raise ReshardError("a page that holds a chain's slot is called free.")
    return Blocks(
        finest=finest,
        first=first,
        chains=chains,
        numbers=tuple(numbers),
        source=source,
        used=used,
        touchable=used | free,
        starts=np.cumsum([0, *(each.shape[1] for each in sources[:-1])]),
        orders=orders,
        early=early,
        prefers=prefers,
        held=held,
    )


def _read_early(
    given: ReshardInput, chains: Sequence[Chain], numbers: Sequence[Ints], used: Bools, first: int
) -> tuple[dict[int, tuple[Ints, Ints]], dict[int, int]]:
    """Return `early` and `prefers` of `Blocks`, and mark their pages as used."""
    index_of = {chain.id: index for index, chain in enumerate(chains)} if given.early else {}
    found: dict[int, list[tuple[Ints, Ints]]] = {}
    prefers: dict[int, int] = {}
    for each in given.early:
        chain = index_of.get(each.id)
        if chain is None or (each.places >= chains[chain].size).any():
            raise ReshardError(f"chain {each.id!r} lacks blocks that rank {each.rank} holds early.")
        number = next(i for i, group in enumerate(given.new) if each.rank in group.ranks)
        pages = each.slots // len(given.new[number].ranks)
        _check_range(pages, given.num_pages[each.rank], "the page of an early slot")
        used[each.rank - first, pages] = True
        found.setdefault(each.rank - first, []).append((numbers[chain][each.places], each.slots))
        prefers.setdefault(chain, number)
    return {
        rank: (joined(part[0] for part in parts), joined(part[1] for part in parts))
        for rank, parts in found.items()
    }, prefers


def _check_groups(given: ReshardInput) -> tuple[Split, int]:
    """Return the finest split and the first rank."""
    olds, news = ([group.ranks for group in groups] for groups in (given.old, given.new))
    spans = [sorted(rank for ranks in groups for rank in ranks) for groups in (olds, news)]
    if not spans[0] or spans[0] != spans[1]:
        raise ReshardError("old and new groups do not cover the same ranks.")
    for ranks in (*olds, *news):
        lead, width = ranks[0], len(ranks)
        if width & (width - 1) or ranks != tuple(range(lead, lead + width)) or lead % width:
            raise ReshardError(f"ranks {ranks} are not an aligned group.")
    if max(len(ranks) for ranks in (*olds, *news)) != len(spans[0]):
        raise ReshardError("no old or new group spans the component.")
    finest = _finest_split((*given.old, *given.new))
    if given.num_kv_heads % finest.tp:
        raise ReshardError(f"{finest.tp} ranks do not share {given.num_kv_heads} KV heads evenly.")
    if given.num_layers % finest.pp:
        raise ReshardError(f"{finest.pp} stages do not share {given.num_layers} layers evenly.")
    if given.num_pages.keys() != set(spans[0]):
        raise ReshardError("the number of pages is not known of exactly the component's ranks.")
    if min(given.num_pages.values()) < 1 or given.rounds_max < 1:
        raise ReshardError("a rank has at least page 0, and a plan at least one round.")
    return finest, spans[0][0]


def _finest_split(groups: Sequence[OldGroup | NewGroup]) -> Split:
    for group in groups:
        if group.stages < 1 or group.stages & (group.stages - 1) or group.stages > len(group.ranks):
            raise ReshardError(f"ranks {group.ranks} cannot be {group.stages} stages.")
    return Split(
        max(group.stages for group in groups),
        max(len(group.ranks) // group.stages for group in groups),
    )


def _check_range(pages: Ints, num_pages: int, what: str) -> None:
    if pages.size and (pages.min() <= NULL_PAGE or pages.max() >= num_pages):
        raise ReshardError(f"{what} is not in 1..{num_pages - 1}.")


def _number(
    chains: Sequence[Chain], num_pages: Sequence[int], first: int
) -> tuple[Ints, list[Ints]]:
    """Return (k, n) slots of the n distinct blocks, and every chain's block numbers.

    `num_pages` are the members' numbers of pages, k of them. The blocks are numbered from `first`
    on.
    """
    width = len(num_pages)
    for chain in chains:
        if chain.slots.ndim != 2 or chain.slots.shape[0] != width:
            raise ReshardError(f"chain {chain.id!r} does not have slots of {width} members.")
        if chain.keys and len(chain.keys) != chain.size:
            raise ReshardError(f"chain {chain.id!r} does not have one key per block.")
    if not chains:
        return np.empty((width, 0), dtype=np.int64), []
    slots = np.concatenate([chain.slots for chain in chains], axis=1).astype(np.int64, copy=False)
    for row, pages in zip(slots, num_pages, strict=True):
        _check_range(row // width, pages, "the page of a slot")
    # Tables over all slots instead of sorting: linear, and a sort of 10,000 blocks takes longer.
    position = np.full(num_pages[0] * width, -1, dtype=np.int64)
    position[slots[0]] = np.arange(slots.shape[1])
    leads = np.flatnonzero(position >= 0)
    distinct = slots[:, position[leads]]
    position[leads] = np.arange(leads.size)
    numbers = position[slots[0]]
    if not (distinct[:, numbers] == slots).all():
        raise ReshardError("two blocks share a slot on one member, but not on another.")
    for row in distinct[1:]:
        if np.count_nonzero(np.bincount(row)) < row.size:
            raise ReshardError("two blocks share a slot on one member, but not on another.")
    numbers += first
    return distinct, pieces(numbers, [chain.size for chain in chains])


def pieces(numbers: Ints, sizes: Sequence[int]) -> list[Ints]:
    """Cut the last dimension into parts of these sizes."""
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [numbers[..., start:end] for start, end in pairwise((0, *ends))]


def joined(numbers: Iterable[Ints]) -> Ints:
    """Concatenate these (n,) arrays; many small operations cost far more than a large one."""
    return np.concatenate([_NOTHING, *numbers])


def _units_of(slots: Ints, lead: int, order: UnitOrder, rank_units: int) -> Ints:
    """Return (U, n): the flat unit that holds each fragment of the blocks."""
    flat: Ints = np.empty((slots.shape[0] * order.per_slot, slots.shape[1]), dtype=np.int64)
    for place, row in enumerate(slots):
        units = order.units_of(row)
        units += (lead + place) * rank_units
        flat[order.fragments(place)] = units
    return flat


def _merge_equal(
    chains: Sequence[Chain],
    numbers: Sequence[Ints],
    source: Ints,
    holders: Ints | None,
    rank_units: int,
) -> list[Ints]:
    """Give blocks of equal keys the number of the first, and that block the best of their units.

    `holders` (U,) is the place of the member that computes each fragment, if all become one group.
    """
    key_of: dict[int, bytes] = {}
    first: dict[bytes, int] = {}
    for chain, blocks in zip(chains, numbers, strict=True):
        for number, key in zip(blocks.tolist(), chain.keys, strict=False):
            if key is not None and key_of.setdefault(number, key) != key:
                raise ReshardError(f"a block of chain {chain.id!r} has two keys.")
    same = np.arange(source.shape[1])
    for number, key in key_of.items():
        same[number] = first.setdefault(key, number)
    # If the rank at the holder's place has its own copy, none need be sent to it.
    if holders is not None:
        copies = np.flatnonzero(same != np.arange(same.size))[::-1]  # of several, the first stays
        for holder, row in zip(holders.tolist(), source, strict=True):
            local = row // rank_units == holder
            better = copies[local[copies] & ~local[same[copies]]]
            row[same[better]] = row[better]
    return [same[blocks] for blocks in numbers]

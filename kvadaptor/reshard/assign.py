"""Assigns chains to new groups, and finds chains that do not fit for lack of pages.

In a component, either all old groups become one, which then takes everything, or one old group
splits into several, which share its chains. The largest chain goes first, to the group that is
least loaded with it. Blocks that a group already has cost nothing, so tasks with a common prefix
stay together until that would unbalance the groups. Terms: `reshard.terms`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvadaptor.reshard.blocks import Blocks, joined
from kvadaptor.reshard.terms import FallbackCause, Ints, ReshardInput


@dataclass(slots=True, eq=False)
class Share:
    """Chain -> new group and number of carried blocks; tasks that no group takes, and why."""

    group_of: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    refused: dict[int, FallbackCause] = field(default_factory=dict)


def urgency(blocks: Blocks) -> list[int]:
    """Return all tasks, most urgent first, within a tier smaller first, then in input order."""
    tasks = [number for number, chain in enumerate(blocks.chains) if not chain.cached]
    return sorted(tasks, key=lambda each: (blocks.chains[each].tier, blocks.chains[each].size))


def recency(blocks: Blocks) -> list[int]:
    """Return all cached chains, most recently used first, then in input order."""
    cached = [number for number, chain in enumerate(blocks.chains) if chain.cached]
    return sorted(cached, key=lambda each: -blocks.chains[each].recency)


def share_out(
    given: ReshardInput, blocks: Blocks, tasks: Sequence[int], cached: Sequence[int]
) -> Share:
    """Give each chain a new group; `tasks` in order of urgency, `cached` in order of recency."""
    share = Share()
    wanted = dict.fromkeys(tasks, 0) if len(given.new) == 1 else _balance(given, blocks, tasks)
    book = _Book(given, blocks)
    for task in () if book.admit_all(wanted) else tasks:
        if not (
            book.admit(task, wanted[task])
            or any(book.admit(task, group) for group in book.by_load(task))
        ):
            share.refused[task] = FallbackCause.PAGES
    share.group_of.update(book.group_of)
    share.sizes.update((task, blocks.chains[task].size) for task in book.group_of)
    for chain in cached:
        group, size = book.admit_prefix(chain)
        if size or not blocks.chains[chain].size:
            share.group_of[chain], share.sizes[chain] = group, size
    return share


class _Book:
    """The blocks that every new group holds, and how many more it can hold."""

    def __init__(self, given: ReshardInput, blocks: Blocks) -> None:
        self._blocks = blocks
        self._widths = [len(group.ranks) for group in given.new]
        self._reserved = [group.reserved_tiers for group in given.new]
        room = blocks.touchable.sum(axis=1)
        self.room = []
        for group, width in zip(given.new, self._widths, strict=True):
            lead = group.ranks[0] - blocks.first
            self.room.append(width * int(room[lead : lead + width].min()))
        self.count = [0] * len(given.new)
        self._holds = np.zeros((len(given.new), blocks.source.shape[1]), dtype=np.bool_)
        self.group_of: dict[int, int] = {}

    def load(self, group: int, more: int = 0) -> float:
        """Return pages per rank, exact as widths are powers of two."""
        return (self.count[group] + more) / self._widths[group]

    def by_load(self, chain: int) -> list[int]:
        """Return the groups for the chain's tier first, and the least loaded first among those."""
        more = self._new_blocks(chain)
        tier = self._blocks.chains[chain].tier
        return sorted(
            range(len(more)),
            key=lambda group: (self.is_foreign(group, tier), self.load(group, more[group])),
        )

    def is_foreign(self, group: int, tier: int) -> bool:
        """Return whether reservations keep tasks of this tier out of the group."""
        reserved = self._reserved[group]
        return tier >= reserved if reserved else tier < max(self._reserved)

    def admit_all(self, wanted: Mapping[int, int]) -> bool:
        """Give every group its wanted tasks, if there is ample room for all."""
        room = self.room.copy()
        for task, group in wanted.items():
            room[group] -= self._blocks.chains[task].size
        if min(room) < 0:
            return False
        self.group_of = dict(wanted)
        for group, holds in enumerate(self._holds):
            numbers = self._blocks.numbers
            holds[joined(numbers[task] for task, to in wanted.items() if to == group)] = True
        self.count = np.count_nonzero(self._holds, axis=1).tolist()
        return True

    def admit(self, task: int, group: int) -> bool:
        """Give the group the task if it has the pages."""
        numbers = self._blocks.numbers[task]
        more = numbers.size - int(np.count_nonzero(self._holds[group, numbers]))
        if self.count[group] + more > self.room[group]:
            return False
        self._take(group, numbers, more)
        self.group_of[task] = group
        return True

    def admit_prefix(self, chain: int) -> tuple[int, int]:
        """Give the group that shares most of the chain's blocks the longest prefix that fits."""
        numbers = self._blocks.numbers[chain]
        shared = numbers.size - np.array(self._new_blocks(chain))
        group = min(range(shared.size), key=lambda each: (-shared[each], self.load(each)))
        needed = np.cumsum(~self._holds[group, numbers])
        size = int(np.searchsorted(needed, self.room[group] - self.count[group], side="right"))
        if size:
            self._take(group, numbers[:size], int(needed[size - 1]))
        return group, size

    def _new_blocks(self, chain: int) -> list[int]:
        numbers = self._blocks.numbers[chain]
        held: list[int] = np.count_nonzero(self._holds[:, numbers], axis=1).tolist()
        return [numbers.size - each for each in held]

    def _take(self, group: int, numbers: Ints, more: int) -> None:
        self._holds[group, numbers] = True
        self.count[group] += more


def _balance(given: ReshardInput, blocks: Blocks, tasks: Sequence[int]) -> dict[int, int]:
    """Assign tasks to groups, largest first, each to the group with the lowest load afterwards.

    A block that only another group holds counts twice, because both would then hold it. A group
    with too few pages comes last, before it those other than the one that has early blocks of the
    task, and before these one that is reserved for other tiers. Among equal groups, the one with
    more of the task already in place wins.
    """
    book = _Book(given, blocks)
    sizes = [blocks.chains[task].size for task in tasks]
    numbers_of_all = joined(blocks.numbers[task] for task in tasks)
    uses = np.bincount(numbers_of_all, minlength=blocks.source.shape[1])
    shared_total = int(np.count_nonzero(uses > 1))
    compact = np.cumsum(uses > 1) - 1
    holds = np.zeros((len(given.new), shared_total), dtype=np.bool_)
    in_place = _in_place(given, blocks, numbers_of_all, sizes)
    wanted: dict[int, int] = {}
    groups = range(len(given.new))
    for at in sorted(range(len(tasks)), key=lambda at: -sizes[at]):
        shared, held, somewhere = compact[:0], [0] * len(groups), 0
        if shared_total:
            numbers = blocks.numbers[tasks[at]]
            shared = compact[numbers[uses[numbers] > 1]]
        if shared.size:
            holding = holds[:, shared]
            held = np.count_nonzero(holding, axis=1).tolist()
            somewhere = int(np.count_nonzero(holding.any(axis=0)))
        best, best_key, tier = 0, None, blocks.chains[tasks[at]].tier
        for group in groups:
            more = sizes[at] - held[group]
            key = (
                book.count[group] + more > book.room[group],
                blocks.prefers.get(tasks[at], group) != group,
                book.is_foreign(group, tier),
                book.load(group, more + somewhere - held[group]),
                -in_place[group][at],
            )
            if best_key is None or key < best_key:
                best, best_key = group, key
        wanted[tasks[at]] = best
        book.count[best] += sizes[at] - held[best]
        if shared.size:
            holds[best, shared] = True
    return wanted


def _in_place(
    given: ReshardInput, blocks: Blocks, numbers: Ints, sizes: Sequence[int]
) -> list[list[int]]:
    """Return, per new group and task, the number of units already in place for that group.

    `numbers` are the concatenated blocks of all tasks, `sizes` their counts.
    """
    rank_of = blocks.source // (blocks.num_pages * blocks.units)
    offsets = np.arange(blocks.units)
    ends = np.cumsum([0, *sizes])
    counts = []
    for group, order in zip(given.new, blocks.orders, strict=True):
        target = group.ranks[0] - blocks.first + order.holders
        right = rank_of == target[:, np.newaxis]
        right &= order.offset_of(blocks.source) == order.offset_of(offsets)[:, np.newaxis]
        total = np.concatenate(([0], np.cumsum(right.sum(axis=0)[numbers])))
        counts.append(np.diff(total[ends]).tolist())
    return counts

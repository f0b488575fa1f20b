"""What a re-shard plan means: memory as dicts, and every promise of a plan checked on it.

Nothing here is shared with the planner but its input and output: units are looked up one by one. A
page is a grid of `rows` ranges of layers times `columns` ranges of heads, and so is a block's KV.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from kvadaptor.reshard.terms import (
    Carried,
    Chain,
    FallbackCause,
    NewGroup,
    OldGroup,
    ReshardInput,
    ReshardPlan,
)

Content = bytes | tuple[int, int]
"""What a block holds: its key, or the old group and the leader's slot that it is known by."""


class Unit(NamedTuple):
    rank: int
    unit: int


class Copy(NamedTuple):
    source: Unit
    target: Unit


Memory = dict[Unit, object]


@dataclass
class Model:
    """An input, looked at the slow way."""

    given: ReshardInput
    rows: int
    columns: int

    @classmethod
    def of(cls, given: ReshardInput) -> "Model":
        groups: list[OldGroup | NewGroup] = [*given.old, *given.new]
        rows = max(group.stages for group in groups)
        return cls(given, rows, max(len(group.ranks) // group.stages for group in groups))

    @property
    def units(self) -> int:
        return self.rows * self.columns

    def _rectangle(self, group: OldGroup | NewGroup, row: int, column: int) -> list[int]:
        """The numbers in one of the k rectangles into which a group cuts the grid."""
        high, wide = self.rows // group.stages, self.columns * group.stages // len(group.ranks)
        return [
            (row * high + down) * self.columns + column * wide + right
            for down in range(high)
            for right in range(wide)
        ]

    def units_of(self, group: OldGroup | NewGroup, slot: int) -> list[int]:
        """The units of a slot of one of the group's ranks, in order."""
        page, inside = divmod(slot, len(group.ranks))
        row, column = divmod(inside, len(group.ranks) // group.stages)
        return [page * self.units + unit for unit in self._rectangle(group, row, column)]

    def fragments_of(self, group: OldGroup | NewGroup, place: int) -> list[int]:
        """The fragments of a block that the member computes: the leader has the last layers."""
        stage, part = divmod(place, len(group.ranks) // group.stages)
        return self._rectangle(group, group.stages - 1 - stage, part)

    def new_group_of(self, rank: int) -> NewGroup:
        return next(group for group in self.given.new if rank in group.ranks)

    @property
    def chains(self) -> dict[str, tuple[int, Chain]]:
        return {
            chain.id: (number, chain)
            for number, group in enumerate(self.given.old)
            for chain in group.chains
        }

    def contents(self, chain_id: str) -> list[Content]:
        number, chain = self.chains[chain_id]
        keys = chain.keys or (None,) * chain.size
        known = self.key_of_slot()
        slots = [(number, int(slot)) for slot in chain.slots[0]]
        return [key or known.get(slot) or slot for key, slot in zip(keys, slots, strict=True)]

    def key_of_slot(self) -> dict[tuple[int, int], bytes]:
        return {
            (number, int(slot)): key
            for number, chain in self.chains.values()
            for slot, key in zip(chain.slots[0], chain.keys, strict=False)
            if key
        }

    def memory(self) -> Memory:
        """Unit -> (content, fragment), or something that occurs nowhere else."""
        memory: Memory = {}
        for group in self.given.old:
            for rank in group.ranks:
                for unit in range(self.units * self.given.num_pages[rank]):
                    memory[Unit(rank, unit)] = ("junk", rank, unit)
        for chain_id, (number, chain) in self.chains.items():
            group = self.given.old[number]
            for place, rank in enumerate(group.ranks):
                fragments = self.fragments_of(group, place)
                for content, slot in zip(self.contents(chain_id), chain.slots[place], strict=True):
                    units = self.units_of(group, int(slot))
                    for unit, fragment in zip(units, fragments, strict=True):
                        memory[Unit(rank, unit)] = (content, fragment)
        for each in self.given.early:
            new = self.new_group_of(each.rank)
            fragments = self.fragments_of(new, new.ranks.index(each.rank))
            contents = self.contents(each.id)
            for at, slot in zip(each.places.tolist(), each.slots.tolist(), strict=True):
                for unit, fragment in zip(self.units_of(new, slot), fragments, strict=True):
                    memory[Unit(each.rank, unit)] = (contents[at], fragment)
        return memory

    def pages(self, group: OldGroup, chain: Chain) -> set[tuple[int, int]]:
        """(rank, page) of every slot of the chain."""
        width = len(group.ranks)
        return {
            (rank, int(slot) // width)
            for rank, row in zip(group.ranks, chain.slots, strict=True)
            for slot in row
        }

    def touchable(self) -> set[tuple[int, int]]:
        """(rank, page) that may be written."""
        free = {(rank, int(page)) for rank, pages in self.given.free.items() for page in pages}
        for number, chain in self.chains.values():
            free |= self.pages(self.given.old[number], chain)
        for each in self.given.early:
            width = len(self.new_group_of(each.rank).ranks)
            free |= {(each.rank, slot // width) for slot in each.slots.tolist()}
        return free


def copies_of(plan: ReshardPlan) -> list[list[Copy]]:
    """The copies of each round."""
    rounds: list[list[Copy]] = [[] for _ in range(plan.rounds)]
    for each in plan.copies:
        rows = zip(
            each.src_ranks.tolist(), each.src_units.tolist(), each.dst_units.tolist(), strict=True
        )
        rounds[each.round - 1] += [
            Copy(Unit(rank, source), Unit(each.dst_rank, target)) for rank, source, target in rows
        ]
    return rounds


def run_together(memory: Memory, rounds: list[list[Copy]]) -> Memory:
    """All copies of a round read before any writes."""
    memory = dict(memory)
    for copies in rounds:
        memory |= {copy.target: memory[copy.source] for copy in copies}
    return memory


def run_one_by_one(memory: Memory, rounds: list[list[Copy]], order: random.Random) -> Memory:
    """The copies of a round in some order, each seeing what those before it wrote."""
    memory = dict(memory)
    for copies in rounds:
        for copy in order.sample(copies, len(copies)):
            memory[copy.target] = memory[copy.source]
    return memory


def check_plan(given: ReshardInput, plan: ReshardPlan, order: random.Random) -> None:
    """Raise AssertionError unless the plan keeps every promise."""
    model = Model.of(given)
    before, rounds = model.memory(), copies_of(plan)
    assert (plan.finest.pp, plan.finest.tp) == (model.rows, model.columns)
    assert plan.rounds <= given.rounds_max
    assert all(rounds), "a round without copies"
    check_lists(model, plan)
    check_leases(model, plan)
    check_writes(model, plan, rounds)
    after = run_together(before, rounds)
    assert after == run_one_by_one(before, rounds, order), "the order within a round matters"
    for carried in plan.carried:
        check_readable(model, plan, carried, after)
    check_amounts(model, plan, rounds)
    check_fallbacks(model, plan)


def check_lists(model: Model, plan: ReshardPlan) -> None:
    """Every chain is in exactly one list, in the order of the input, whole if it is a task."""
    chains = model.chains
    cut = [each.id for each in plan.carried if each.blocks.size < each.size]
    refused = [each.id for each in plan.fallbacks]
    listed = [each.id for each in plan.carried] + refused + list(plan.dropped)
    assert Counter(listed) == Counter(chains.keys()), "a chain is lost or listed twice"
    assert all(chains[each][1].cached for each in (*cut, *plan.dropped)), "a task was cut"
    assert not any(chains[each][1].cached for each in refused)
    order = list(chains)
    for some in ([each.id for each in plan.carried], refused):
        places = [order.index(each) for each in some]
        assert places == sorted(places)
    ages = [chains[each][1].recency for each in plan.dropped]
    assert ages == sorted(ages)
    for carried in plan.carried:
        number, chain = chains[carried.id]
        old, new = set(model.given.old[number].ranks), set(plan.groups[carried.group].ranks)
        assert old <= new or new <= old
        assert (carried.size, carried.cached) == (chain.size, chain.cached)
        assert carried.blocks.size <= chain.size


def check_leases(model: Model, plan: ReshardPlan) -> None:
    """Members lease equally many pages that they may have, and tables are bijections onto them."""
    allowed = model.touchable()
    assert [lease.ranks for lease in plan.groups] == [each.ranks for each in model.given.new]
    for lease in plan.groups:
        k, n = lease.width, lease.indices
        assert lease.pages.shape == (k, n)
        for place, rank in enumerate(lease.ranks):
            pages = lease.pages[place].tolist()
            assert pages == sorted(set(pages)), "pages are not distinct and ascending"
            assert {(rank, page) for page in pages} <= allowed, "a page was not to be touched"
            if k > 1:
                table = lease.table[place].tolist()
                assert table[:k] == list(range(k)), "the null page is not itself"
                slots = [page * k + slot for page in pages for slot in range(k)]
                assert sorted(table[k:]) == slots, "the table is no bijection"
        logical = range(k, k * (n + 1)) if k > 1 else lease.pages[0].tolist()
        assert set(lease.used.tolist()) <= set(logical)
        if k == 1:
            assert lease.used.tolist() == lease.pages[0].tolist()


def check_writes(model: Model, plan: ReshardPlan, rounds: list[list[Copy]]) -> None:
    """Nothing is written that is read in this round or later, or outside the leased pages."""
    leased = {
        (rank, page)
        for lease in plan.groups
        for rank, row in zip(lease.ranks, lease.pages.tolist(), strict=True)
        for page in row
    }
    assert all(page < model.given.num_pages[rank] for rank, page in leased), "there is no such page"
    targets = [copy.target for copies in rounds for copy in copies]
    assert len(set(targets)) == len(targets), "a unit is written twice"
    assert {(rank, unit // model.units) for rank, unit in targets} <= leased
    read_later: set[Unit] = set()
    for copies in reversed(rounds):
        read_later |= {copy.source for copy in copies}
        written = {copy.target for copy in copies}
        assert not written & read_later, "a unit is written before it was read"


def check_readable(model: Model, plan: ReshardPlan, carried: Carried, after: Memory) -> None:
    """Every member finds the fragments it computes of every block of the chain."""
    lease, group = plan.groups[carried.group], model.given.new[carried.group]
    slots = lease.slots(carried.blocks).tolist()
    contents = model.contents(carried.id)
    for place, rank in enumerate(lease.ranks):
        fragments = model.fragments_of(group, place)
        for content, slot in zip(contents, slots[place], strict=False):
            for unit, fragment in zip(model.units_of(group, slot), fragments, strict=True):
                assert after[Unit(rank, unit)] == (content, fragment), "a block is not readable"


def check_amounts(model: Model, plan: ReshardPlan, rounds: list[list[Copy]]) -> None:
    """Each content is there once per new group, and what is not in place was copied once."""
    needed = 0
    for number, lease in enumerate(plan.groups):
        mine = [each for each in plan.carried if each.group == number]
        contents = {
            content for each in mine for content in model.contents(each.id)[: each.blocks.size]
        }
        blocks = {block for each in mine for block in each.blocks.tolist()}
        assert blocks == set(lease.used.tolist())
        assert len(blocks) == len(contents), "a shared block is there twice"
        needed += len(contents) * model.units
    copied = {copy.target for copies in rounds for copy in copies}
    assert len(copied) + plan.in_place_units == needed, "a unit is lost or copied in vain"
    for each in plan.carried:
        lease, group = plan.groups[each.group], model.given.new[each.group]
        own = {
            Unit(rank, unit)
            for rank, row in zip(lease.ranks, lease.slots(each.blocks).tolist(), strict=True)
            for slot in row
            for unit in model.units_of(group, slot)
        }
        assert each.in_place == (not own & copied)


def check_fallbacks(model: Model, plan: ReshardPlan) -> None:
    """Tasks stay behind only for want of room, the most urgent last; with room all is easy."""
    given, chains = model.given, model.chains
    tasks = [each for each in chains if not chains[each][1].cached]
    tasks.sort(key=lambda each: (chains[each][1].tier, chains[each][1].size))
    causes = {each.id: each.cause for each in plan.fallbacks}
    allowed = Counter(rank for rank, _ in model.touchable())
    group_of = {each.id: each.group for each in plan.carried}
    for at, task in enumerate(tasks):
        if causes.get(task) is FallbackCause.PAGES:
            for number, new in enumerate(given.new):
                ahead = [each for each in tasks[:at] if group_of.get(each) == number]
                contents = {content for each in (*ahead, task) for content in model.contents(each)}
                room = len(new.ranks) * min(allowed[rank] for rank in new.ranks)
                assert len(contents) > room, "a task would have had room"
    free = {rank: len({*map(int, pages)}) for rank, pages in given.free.items()}
    total = sum(chain.size for _, chain in chains.values())
    if all(free.get(rank, 0) * len(new.ranks) >= total for new in given.new for rank in new.ranks):
        assert not causes, "there was room for all"
        assert not plan.dropped
        assert all(each.blocks.size == each.size for each in plan.carried)
        assert plan.rounds <= 1

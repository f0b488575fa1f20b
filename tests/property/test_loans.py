"""Loans: every part that a rank lacks once, from a rank that holds it, into a slot out of use."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_pool.loans import (
    Loan,
    LoanError,
    fewest_whole_layers,
    floor_s,
    holders_of,
    loan_plan,
    most_whole_layers,
    order_of,
    part_of,
    spread_whole,
)
from tests.harness.loan_slots import SlotError, SlotStates

RANKS_MAX = 16
LAYERS_MAX = 8
SPLITS = [
    (ranks, parts)
    for ranks in range(1, RANKS_MAX + 1)
    for parts in (1, 2, 4, 8, 16)
    if ranks % parts == 0
]


@dataclass(frozen=True)
class Case:
    """A cell, and what one rank of it asks for."""

    rank: int
    ranks: int
    parts: int
    layers: int
    whole: frozenset[int]
    holders: frozenset[int]
    slots: int

    @property
    def held(self) -> list[int]:
        """The part of every rank."""
        return [part for part in range(self.parts) for _ in range(self.ranks // self.parts)]

    @property
    def following(self) -> list[int]:
        """The parts that the rank lacks, in its order."""
        own = self.held[self.rank]
        return [*range(own + 1, self.parts), *range(own)]

    @property
    def borrows(self) -> bool:
        """Whether the holders have all that it lacks."""
        return {*self.following} <= {self.held[rank] for rank in self.holders}

    def plan(self) -> tuple[Loan, ...]:
        return loan_plan(
            self.rank,
            self.ranks,
            self.parts,
            self.layers,
            whole=self.whole,
            holders=self.holders,
            slots=self.slots,
        )

    def plans(self) -> list[tuple[Loan, ...]]:
        """The plans of all ranks."""
        return [replace(self, rank=rank).plan() for rank in range(self.ranks)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, parts = draw(st.sampled_from(SPLITS))
    layers = draw(st.integers(0, LAYERS_MAX))
    numbers = st.integers(0, ranks - 1)
    return Case(
        rank=draw(numbers),
        ranks=ranks,
        parts=parts,
        layers=layers,
        whole=frozenset(draw(st.sets(st.sampled_from(range(layers))))) if layers else frozenset(),
        holders=frozenset(range(ranks)) - draw(st.sets(numbers)),
        slots=draw(st.integers(1, 20)),
    )


def bytes_of(plan: Iterable[Loan], part_bytes: Sequence[int]) -> int:
    """What the loans of a plan copy in one step; `part_bytes[layer]` is the size of one part."""
    return sum(part_bytes[loan.layer] for loan in plan)


@st.composite
def cases_that_borrow(draw: st.DrawFn) -> Case:
    """Cases in which each part has a holder, so that every rank can borrow."""
    case = draw(cases())
    per_part = case.ranks // case.parts
    spared = {part * per_part + draw(st.integers(0, per_part - 1)) for part in range(case.parts)}
    return replace(case, holders=case.holders | spared)


@given(cases())
@settings(deadline=None)
def test_a_plan_exists_exactly_if_the_holders_have_every_part(case: Case) -> None:
    if case.borrows:
        case.plan()
        return
    with pytest.raises(LoanError) as refused:
        case.plan()
    readable = {case.held[rank] for rank in case.holders}
    for part in case.following:
        assert (f"part {part} (" in str(refused.value)) == (part not in readable)


@given(cases_that_borrow())
@settings(deadline=None)
def test_each_part_that_is_lacking_is_borrowed_once_in_order(case: Case) -> None:
    assert order_of(case.rank, case.ranks, case.parts)[1:] == tuple(case.following)
    assert [(loan.layer, loan.part) for loan in case.plan()] == [
        (layer, part)
        for layer in range(case.layers)
        if layer not in case.whole
        for part in case.following
    ]


@given(cases_that_borrow())
@settings(deadline=None)
def test_a_lender_is_another_rank_that_holds_what_it_lends(case: Case) -> None:
    for loan in case.plan():
        assert loan.lender in case.holders
        assert case.held[loan.lender] == loan.part == part_of(loan.lender, case.ranks, case.parts)
        assert loan.lender in holders_of(loan.part, case.ranks, case.parts)
        assert loan.lender != case.rank


@given(cases_that_borrow())
@settings(deadline=None)
def test_a_slot_is_written_only_after_the_loan_that_had_it(case: Case) -> None:
    plan = case.plan()
    last: dict[int, int] = {}
    for number, loan in enumerate(plan):
        assert 0 <= loan.slot < case.slots
        assert loan.after == last.get(loan.slot)
        # When it may be copied, as many loans as there are slots are under way, itself included.
        assert number - (-1 if loan.after is None else loan.after) <= case.slots
        last[loan.slot] = number
    assert len(last) == min(case.slots, len(plan))


@given(cases())
@settings(deadline=None)
def test_at_one_loan_number_all_ranks_have_different_lenders(case: Case) -> None:
    for loans in zip(*replace(case, holders=frozenset(range(case.ranks))).plans(), strict=True):
        assert sorted(loan.lender for loan in loans) == [*range(case.ranks)]
        assert len({loan.layer for loan in loans}) == 1


@given(cases_that_borrow())
@settings(deadline=None)
def test_the_holders_that_remain_share_the_readers_of_lost_ones(case: Case) -> None:
    for loans in zip(*case.plans(), strict=True):
        readers = Counter(loan.lender for loan in loans)
        for part in range(case.parts):
            able = case.holders & {*holders_of(part, case.ranks, case.parts)}
            counts = [readers[rank] for rank in able]
            assert sum(counts) == case.ranks // case.parts
            assert max(counts) - min(counts) <= 1
            assert min(counts) >= 1


@given(cases_that_borrow(), st.lists(st.integers(0, 1000), min_size=LAYERS_MAX))
@settings(deadline=None)
def test_bytes_are_those_of_the_parts_that_are_lacking(case: Case, sizes: list[int]) -> None:
    wanted = sum(sizes[layer] for layer in range(case.layers) if layer not in case.whole)
    assert bytes_of(case.plan(), sizes) == wanted * (case.parts - 1)


@given(st.integers(0, 130), st.data())
@settings(deadline=None)
def test_whole_layers_are_spread_evenly(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, layers))
    whole = sorted(spread_whole(layers, count))
    assert len(whole) == count
    if whole:
        assert whole[0] == 0
        gaps = [after - layer for layer, after in zip(whole, [*whole[1:], layers], strict=True)]
        assert max(gaps) - min(gaps) <= 1


@given(
    st.one_of(
        st.lists(st.integers(0, 1000), max_size=20),
        st.builds(lambda size, layers: [size] * layers, st.integers(1, 1000), st.integers(0, 20)),
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(0.0, 200.0),
)
@settings(deadline=None)
def test_the_fewest_whole_layers_are_the_fewest(
    sizes: list[int], parts: int, floor_s_max: float
) -> None:
    def floor_with(count: int) -> float:
        whole = spread_whole(len(sizes), count)
        plan = loan_plan(0, parts, parts, len(sizes), whole=whole)
        return floor_s(bytes_of(plan, sizes), 100.0)

    fewest = fewest_whole_layers(sizes, parts, 100.0, floor_s_max)
    assert 0 <= fewest <= len(sizes)
    assert floor_with(fewest) <= floor_s_max
    assert all(floor_with(count) > floor_s_max for count in range(fewest))


@given(
    st.lists(st.integers(0, 1000), max_size=LAYERS_MAX),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 20_000),
)
@settings(deadline=None)
def test_the_most_whole_layers_are_the_most_that_fit(
    sizes: list[int], parts: int, bytes_max: int
) -> None:
    def taken_by(count: int) -> int:
        plan = loan_plan(0, parts, parts, len(sizes))
        whole = spread_whole(len(sizes), count)
        return sum(sizes[loan.layer] for loan in plan if loan.layer in whole)

    most = most_whole_layers(sizes, parts, bytes_max)
    assert taken_by(most) <= bytes_max
    assert all(taken_by(count) > bytes_max for count in range(most + 1, len(sizes) + 1))


EVENTS = ("begin_copy", "end_copy", "begin_use", "end_use")
ENDED = len(EVENTS)


def allowed(plan: tuple[Loan, ...], stages: list[int], number: int, event: int) -> bool:
    """Whether an event of a loan may happen; a loan's stage is the number of its events so far."""
    if stages[number] != event:
        return False
    earlier = range(number)
    match EVENTS[event]:
        case "begin_copy":
            after = plan[number].after
            return all(stages[each] > 0 for each in earlier) and (
                after is None or stages[after] == ENDED
            )
        case "begin_use":
            return all(stages[each] > event for each in earlier)
    return True


@given(cases_that_borrow(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_ring_allows_what_the_plan_allows_and_every_step_ends(case: Case, seed: int) -> None:
    plan, draws = case.plan(), random.Random(seed)
    ring = SlotStates(case.slots)
    for _ in range(2):
        ring.begin_step(plan)
        stages = [0] * len(plan)
        while min(stages, default=ENDED) < ENDED:
            # Nothing happens to loans far from the first one that has not ended.
            first = next(number for number, stage in enumerate(stages) if stage < ENDED)
            near = range(max(0, first - 2), min(len(plan), first + case.slots + 2))
            every = [(number, event) for number in near for event in range(ENDED)]
            right = [each for each in every if allowed(plan, stages, *each)]
            assert right
            for number, event in draws.choice(every), draws.choice(right):
                may = allowed(plan, stages, number, event)
                before = ring.states()
                if may:
                    getattr(ring, EVENTS[event])(number)
                    stages[number] += 1
                else:
                    with pytest.raises(SlotError):
                        getattr(ring, EVENTS[event])(number)
                    assert ring.states() == before
                    ring.integrity()

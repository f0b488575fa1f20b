"""Who lends which unit into which slot: one plan of all kinds of units, in the order of use."""

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st

from comm_pool.loans import Loan, holders_of, order_of
from tests.harness.loan_slots import SlotStates
from worker.engine.weights.lending import Place, plan_of_units
from worker.engine.weights.part_memory import UnitKind

QKV, OUTPUT = UnitKind.QKV, UnitKind.OUTPUT
FEED_FORWARD, EXPERTS = UnitKind.FEED_FORWARD, UnitKind.EXPERTS
LAYER = (QKV, OUTPUT, FEED_FORWARD)


def test_kinds_that_take_turns_share_slots_each_with_its_own() -> None:
    """Of halves, each unit has one loan; the third of a kind takes the slot of the first."""
    plan = plan_of_units(LAYER * 4, Place(rank=1, first=0, ranks=2, parts=2))
    assert [loan.layer for loan in plan] == [*range(12)]
    assert {(loan.part, loan.lender) for loan in plan} == {(0, 0)}
    assert [loan.slot for loan in plan] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    assert [loan.after for loan in plan] == [None] * 6 + [*range(6)]


def test_parts_of_a_unit_follow_each_other_in_the_order_of_use() -> None:
    plan = plan_of_units([QKV, FEED_FORWARD] * 2, Place(rank=6, first=4, ranks=4, parts=4))
    assert [loan.layer for loan in plan] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [loan.part for loan in plan] == [3, 0, 1] * 4
    assert [loan.lender for loan in plan] == [3, 0, 1] * 4  # Within the group, from its first rank.
    assert [loan.slot for loan in plan] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 3, 0, 1]
    assert [loan.after for loan in plan] == [*[None] * 7, 0, 1, None, 3, 4]


def test_layers_of_different_kinds_need_not_take_turns() -> None:
    """Dense layers before those with experts, for example."""
    kinds = [FEED_FORWARD, FEED_FORWARD, EXPERTS, FEED_FORWARD, EXPERTS]
    plan = plan_of_units(kinds, Place(rank=0, first=0, ranks=2, parts=2))
    assert [(loan.layer, loan.slot, loan.after) for loan in plan] == [
        (0, 0, None),
        (1, 1, None),
        (2, 0, None),
        (3, 0, 0),
        (4, 1, None),
    ]


def test_units_of_whole_layers_have_no_loans_and_take_no_slot() -> None:
    plan = plan_of_units(LAYER * 4, Place(rank=0, first=0, ranks=2, parts=2), {3, 4, 5})
    assert [loan.layer for loan in plan] == [0, 1, 2, *range(6, 12)]
    assert [loan.slot for loan in plan] == [0] * 3 + [1] * 3 + [0] * 3
    assert [loan.after for loan in plan] == [None] * 6 + [0, 1, 2]
    assert plan_of_units(LAYER, Place(rank=0, first=0, ranks=2, parts=2), {0, 1, 2}) == ()


def test_a_place_knows_its_part() -> None:
    assert [Place(rank, 4, 4, 2).part for rank in range(4, 8)] == [0, 0, 1, 1]
    assert [Place(rank, 0, 4, 4).part for rank in range(4)] == [0, 1, 2, 3]


@st.composite
def places(draw: st.DrawFn) -> Place:
    parts = draw(st.sampled_from([2, 4, 8]))
    ranks = parts * draw(st.sampled_from([1, 2]))
    first = ranks * draw(st.integers(0, 2))
    return Place(first + draw(st.integers(0, ranks - 1)), first, ranks, parts)


def with_own_slots(plan: tuple[Loan, ...], kinds: list[UnitKind]) -> tuple[Loan, ...]:
    """The plan with the slots of all kinds in one ring."""
    every = [*UnitKind]
    return tuple(
        Loan(
            loan.layer,
            loan.part,
            loan.lender,
            loan.slot * len(every) + every.index(kinds[loan.layer]),
            loan.after,
        )
        for loan in plan
    )


@given(places(), st.lists(st.sampled_from([*UnitKind]), max_size=12), st.sets(st.integers(0, 11)))
@settings(deadline=None)
def test_each_unit_has_the_parts_that_the_rank_lacks_and_slots_come_round_in_time(
    place: Place, kinds: list[UnitKind], whole: set[int]
) -> None:
    plan = plan_of_units(kinds, place, whole)
    number = place.rank - place.first
    lacking = order_of(number, place.ranks, place.parts)[1:]
    assert [(loan.layer, loan.part) for loan in plan] == [
        (unit, part)
        for unit, kind in enumerate(kinds)
        if unit not in whole and kind.is_of_layer
        for part in lacking
    ]
    last: dict[tuple[UnitKind, int], int] = {}
    for at, loan in enumerate(plan):
        assert loan.lender in holders_of(loan.part, place.ranks, place.parts)
        slot = kinds[loan.layer], loan.slot
        assert loan.after == last.get(slot), "the slot's loan before it"
        last[slot] = at
    states = SlotStates(place.parts * len(UnitKind))
    states.begin_step(with_own_slots(plan, kinds))
    waiting = 0
    for at in range(len(plan)):
        while waiting < len(plan) and _is_free(plan[waiting], at):
            states.begin_copy(waiting)
            states.end_copy(waiting)
            waiting += 1
        states.begin_use(at)
        states.end_use(at)


def _is_free(loan: Loan, used: int) -> bool:
    return loan.after is None or loan.after < used

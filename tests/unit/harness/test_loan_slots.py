"""The slots of a ring by example: a loan's way through its slot, and every event out of turn."""

from collections.abc import Callable

import pytest

from comm_pool.loans import Loan, loan_plan
from tests.harness.loan_slots import SlotError, SlotState, SlotStates

FREE, FILLING, FULL, IN_USE = SlotState

PLAN = loan_plan(0, 2, 2, 3)
"""Three loans in two slots: the last one takes the slot of the first."""


def ring(*events: Callable[[SlotStates], None]) -> SlotStates:
    states = SlotStates(2)
    states.begin_step(PLAN)
    for event in events:
        event(states)
    return states


def copied(number: int) -> Callable[[SlotStates], None]:
    def run(states: SlotStates) -> None:
        states.begin_copy(number)
        states.end_copy(number)

    return run


def used(number: int) -> Callable[[SlotStates], None]:
    def run(states: SlotStates) -> None:
        states.begin_use(number)
        states.end_use(number)

    return run


def test_a_slot_goes_round() -> None:
    states = ring()
    seen = [states.states()[0]]
    for event in (states.begin_copy, states.end_copy, states.begin_use, states.end_use):
        event(0)
        seen.append(states.states()[0])
        assert states.states()[1] == FREE
    assert seen == [FREE, FILLING, FULL, IN_USE, FREE]


def test_a_step_ends_when_all_loans_are_used() -> None:
    states = ring(copied(0), copied(1), used(0), copied(2), used(1))
    with pytest.raises(SlotError, match="before the last one has used all"):
        states.begin_step(PLAN)
    states.begin_use(2)
    with pytest.raises(SlotError, match="before the last one has used all"):
        states.begin_step(PLAN)
    states.end_use(2)
    states.begin_step(loan_plan(0, 2, 2, 1))
    copied(0)(states)
    used(0)(states)
    states.begin_step(())
    states.begin_step(PLAN)


def test_a_slot_in_use_is_not_overwritten() -> None:
    states = ring(copied(0), copied(1))
    for _ in range(2):
        with pytest.raises(SlotError, match=r"slot 0 of loan 2 is .*, not free"):
            states.begin_copy(2)
        if states.states()[0] == FULL:
            states.begin_use(0)
    states.end_use(0)
    states.begin_copy(2)


def test_copies_end_in_any_order_and_parts_go_out_of_use_in_any_order() -> None:
    states = ring()
    states.begin_copy(0)
    states.begin_copy(1)
    states.end_copy(1)
    states.end_copy(0)
    states.begin_use(0)
    states.begin_use(1)
    states.end_use(1)
    states.end_use(0)
    assert states.states() == (FREE, FREE)


@pytest.mark.parametrize(
    ("states", "event", "number", "reason"),
    [
        (ring(), "begin_copy", 1, "loan 1 is copied instead of loan 0"),
        (ring(copied(0)), "begin_copy", 0, "loan 0 is copied instead of loan 1"),
        (ring(copied(0), used(0)), "begin_copy", 0, "loan 0 is copied instead of loan 1"),
        (ring(), "end_copy", 0, "slot 0 of loan 0 is free, not filling"),
        (ring(copied(0)), "end_copy", 0, "is full, not filling"),
        (ring(), "begin_use", 0, "is free, not full"),
        (ring(lambda it: it.begin_copy(0)), "begin_use", 0, "is filling, not full"),
        (ring(copied(0), copied(1)), "begin_use", 1, "loan 1 is used instead of loan 0"),
        (ring(copied(0)), "end_use", 0, "is full, not in use"),
        (ring(copied(0), used(0)), "end_use", 0, "is free, not in use"),
        (ring(copied(0)), "begin_use", 2, "slot 0 holds loan 0, not loan 2"),
        (ring(), "begin_copy", 3, "no loan 3"),
        (ring(), "end_copy", -1, "no loan -1"),
    ],
)
def test_an_event_out_of_turn_is_refused_and_changes_nothing(
    states: SlotStates, event: str, number: int, reason: str
) -> None:
    before = (states.states(), vars(states).copy(), [*states._loans])
    with pytest.raises(SlotError, match=reason):
        getattr(states, event)(number)
    assert (states.states(), vars(states), states._loans) == before


def test_a_plan_that_reuses_a_slot_too_early_is_found() -> None:
    states = SlotStates(2)
    states.begin_step((Loan(0, 1, 1, 0, None), Loan(1, 1, 1, 0, None)))
    copied(0)(states)
    used(0)(states)
    with pytest.raises(SlotError, match="waits for loan None, but slot 0 had loan 0 last"):
        states.begin_copy(1)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_plan_for_a_larger_ring_is_refused(slot: int) -> None:
    with pytest.raises(SlotError, match=f"loan 0 needs slot {slot}, which the ring lacks"):
        SlotStates(2).begin_step((Loan(0, 1, 1, slot, None),))


def test_a_new_ring_is_free_and_has_no_loans() -> None:
    states = SlotStates(3)
    states.integrity()
    assert states.states() == (FREE, FREE, FREE)
    with pytest.raises(SlotError, match="the step has no loan 0"):
        states.begin_copy(0)


def test_a_ring_has_a_slot() -> None:
    with pytest.raises(AssertionError):
        SlotStates(0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_states", [FREE, FULL]),
        ("_states", [FILLING, IN_USE]),
        ("_states", [FULL]),
        ("_loans", [None, 1]),
        ("_loans", [1, 0]),
        ("_loans", [2, 1]),
        ("_copied", 1),
        ("_copied", 3),
        ("_used", 1),
        ("_used", 3),
        ("_plan", ()),
    ],
)
def test_integrity_finds_what_contradicts(name: str, wrong: object) -> None:
    states = ring(copied(0), copied(1))
    states.integrity()
    setattr(states, name, wrong)
    with pytest.raises(AssertionError):
        states.integrity()

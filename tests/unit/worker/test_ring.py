"""The ring's copies: in order, each in a slot that no step reads, and a new step begins anew."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_pool.loans import Loan, loan_plan
from tests.harness.loan_slots import SlotStates
from worker.engine.weights.ring import LoanCopy, LoanRing, make_ring

BYTES = 16


class RecordedRing(LoanRing):
    """Tells each event to the model of slots, which refuses those out of turn."""

    def __init__(self, plan: Sequence[Loan]) -> None:
        slots = 1 + max((loan.slot for loan in plan), default=0)
        self.plan = plan
        self.states = SlotStates(slots)
        self.memory = torch.zeros((slots, BYTES), dtype=torch.int8)
        super().__init__(
            [
                LoanCopy(content_of(number), self.memory[loan.slot], loan.after)
                for number, loan in enumerate(plan)
            ]
        )
        self.events: list[tuple[str, int]] = []

    def begin_step(self) -> None:
        self.states.begin_step(self.plan)
        super().begin_step()

    def _copy(self, number: int) -> None:
        self.events.append(("copy", number))
        self.states.begin_copy(number)
        super()._copy(number)
        self.states.end_copy(number)

    def _wait(self, number: int) -> None:
        super()._wait(number)
        self.events.append(("use", number))
        self.states.begin_use(number)

    def _end_use(self, number: int) -> None:
        self.states.end_use(number)
        super()._end_use(number)


def content_of(number: int) -> torch.Tensor:
    """What the lender of a loan has."""
    return torch.full((BYTES,), 1 + number % 100, dtype=torch.int8)


def run_step(ring: LoanRing) -> None:
    """Use all loans of a step in order; each finds its own bytes until its use ends."""
    ring.begin_step()
    for number, loan in enumerate(ring.loans):
        with ring.use(number):
            assert torch.equal(loan.slot, content_of(number)), number


def interleaved(plans: Sequence[tuple[Loan, ...]]) -> tuple[Loan, ...]:
    """Loans of several rings that take turns, each with slots of its own."""
    found: list[Loan] = []
    numbers: list[list[int]] = [[] for _ in plans]
    for index in range(max(map(len, plans), default=0)):
        for which, plan in enumerate(plans):
            if index < len(plan):
                loan = plan[index]
                after = None if loan.after is None else numbers[which][loan.after]
                numbers[which].append(len(found))
                slot = which + len(plans) * loan.slot
                found.append(Loan(loan.layer, loan.part, loan.lender, slot, after))
    return tuple(found)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Loan, ...]:
    parts = draw(st.sampled_from([2, 4, 8]))
    rank = draw(st.integers(0, parts - 1))
    rings = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=3))
    return interleaved(
        [loan_plan(rank, parts, parts, layers, slots=slots) for layers, slots in rings]
    )


@given(plans(), st.integers(1, 3))
@settings(deadline=None)
def test_no_slot_is_written_between_a_copy_and_the_end_of_its_use(
    plan: tuple[Loan, ...], steps: int
) -> None:
    ring = RecordedRing(plan)
    for _ in range(steps):
        run_step(ring)
    numbers = [*range(len(plan))] * steps
    for event in ("copy", "use"):
        assert [number for name, number in ring.events if name == event] == numbers


@given(plans())
@settings(deadline=None)
def test_a_loan_is_copied_as_soon_as_the_one_before_it_and_its_slot_allow(
    plan: tuple[Loan, ...],
) -> None:
    ring = RecordedRing(plan)
    run_step(ring)
    copied_at = {number: at for at, (name, number) in enumerate(ring.events) if name == "copy"}
    used_at = {number: at for at, (name, number) in enumerate(ring.events) if name == "use"}
    for number, loan in enumerate(plan):
        earliest = max(
            0 if loan.after is None else used_at[loan.after] + 1,
            copied_at[number - 1] + 1 if number else 0,
        )
        assert copied_at[number] == earliest, number


def test_a_ring_of_one_slot_copies_and_uses_in_turn() -> None:
    ring = RecordedRing(loan_plan(0, 2, 2, 3, slots=1))
    run_step(ring)
    assert ring.events == [(event, number) for number in range(3) for event in ("copy", "use")]


def test_a_ring_with_a_slot_for_each_loan_copies_all_at_once() -> None:
    ring = RecordedRing(loan_plan(0, 4, 4, 2, slots=6))
    run_step(ring)
    assert ring.events[:6] == [("copy", number) for number in range(6)]


@pytest.mark.parametrize("used", range(6))
def test_a_step_after_an_aborted_one_begins_anew(used: int) -> None:
    ring = make_ring(RecordedRing(loan_plan(1, 2, 2, 6, slots=2)).loans, torch.device("cpu"))
    assert type(ring) is LoanRing
    ring.begin_step()
    for number in range(used):
        with ring.use(number):
            pass
    with pytest.raises(ValueError, match="a kernel failed"), ring.use(used):
        raise ValueError("a kernel failed")
    for loan in ring.loans:
        loan.slot.fill_(-1)
    run_step(ring)


def test_a_loan_whose_use_failed_frees_no_slot() -> None:
    ring = RecordedRing(loan_plan(0, 2, 2, 2, slots=1))
    ring.begin_step()
    with pytest.raises(ValueError, match="a kernel failed"), ring.use(0):
        raise ValueError("a kernel failed")
    assert ring.events == [("copy", 0), ("use", 0)]


def test_the_floor_is_that_of_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of three, after one that does not count; a clock of its own."""
    ring = RecordedRing(loan_plan(0, 2, 2, 3, slots=1))
    took = iter([100, 5, 1, 3])
    now = 0.0

    def run_alone() -> None:
        nonlocal now
        LoanRing.run_alone(ring)
        now += next(took)

    monkeypatch.setattr(ring, "run_alone", run_alone)
    monkeypatch.setattr("worker.engine.weights.ring.time.perf_counter", lambda: now)
    assert ring.floor_s() == 3
    assert next(took, None) is None
    assert len(ring.events) == 4 * 6
    run_step(ring)


def test_copies_on_cpu_are_what_computation_waits_for() -> None:
    ring = RecordedRing(loan_plan(0, 2, 2, 3, slots=1))
    assert ring.wait_s == 0
    run_step(ring)
    once = ring.wait_s
    run_step(ring)
    assert 0 < once < ring.wait_s


def test_a_step_borrows_the_bytes_of_all_its_loans() -> None:
    assert RecordedRing(loan_plan(0, 4, 4, 2, slots=2)).step_bytes == 6 * BYTES
    empty: list[Any] = []
    assert LoanRing(empty).step_bytes == 0


@pytest.mark.parametrize("wrong", [None, 0])
def test_a_plan_that_frees_a_slot_too_early_is_noticed(wrong: int | None) -> None:
    """What the tests above rest on: two slots, and loan 3 takes the slot of loan 1."""
    plan = [*loan_plan(0, 2, 2, 4, slots=2)]
    last = plan[3]
    assert (last.slot, last.after) == (1, 1)
    plan[3] = Loan(last.layer, last.part, last.lender, last.slot, wrong)
    with pytest.raises(RuntimeError, match="slot 1"):
        run_step(RecordedRing(plan))

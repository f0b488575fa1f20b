"""What the slots of a rank's ring may do, one event after another. Pure.

A slot is free, then it fills, is full, is in use, and is free again. Copies begin and parts come
into use in the order of the plan; copies end, and parts go out of use, in any order. `SlotStates`
follows each event of a ring, and raises where a copy would overwrite a part that a step still
reads, or a step would read a part that is not there.
"""

from collections.abc import Sequence
from enum import Enum

from comm_pool.loans import Loan


class SlotError(RuntimeError):
    """An event that the state of a slot does not allow; the message is one sentence."""


class SlotState(Enum):
    """What happens to the bytes of a slot."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    IN_USE = "in use"


class SlotStates:
    """The slots of one ring, 0..slots-1, through one step after another.

    Loans are named by their number in the step's plan. A method that raises `SlotError` changes
    nothing.
    """

    def __init__(self, slots: int) -> None:
        assert slots >= 1, "a ring has at least one slot."
        self._states = [SlotState.FREE] * slots
        self._loans: list[int | None] = [None] * slots
        """Slot -> the loan that has it or had it last in this step."""
        self._plan: Sequence[Loan] = ()
        self._copied = 0
        """The number of loans whose copy has begun."""
        self._used = 0
        """The number of loans whose use has begun."""

    def states(self) -> tuple[SlotState, ...]:
        """Return the state of every slot."""
        return tuple(self._states)

    def begin_step(self, plan: Sequence[Loan]) -> None:
        """Take the plan of the next step, which may be another one.

        Raises `SlotError` if the step before has not used all of its loans, or if a loan of the
        plan names a slot that the ring lacks.
        """
        if self._used < len(self._plan) or any(each != SlotState.FREE for each in self._states):
            raise SlotError("a step begins before the last one has used all of its loans.")
        for number, loan in enumerate(plan):
            if not 0 <= loan.slot < len(self._states):
                raise SlotError(f"loan {number} needs slot {loan.slot}, which the ring lacks.")
        self._plan = plan
        self._loans = [None] * len(self._states)
        self._copied = self._used = 0
        self.integrity()

    def begin_copy(self, number: int) -> None:
        """Note that the copy of a loan begins: its slot fills.

        Raises `SlotError` unless it is the next loan of the plan, its slot is free, and its `after`
        is the loan that had the slot last.
        """
        loan = self._loan(number)
        if number != self._copied:
            raise SlotError(f"loan {number} is copied instead of loan {self._copied}.")
        self._expect(number, SlotState.FREE)
        if loan.after != self._loans[loan.slot]:
            raise SlotError(
                f"loan {number} waits for loan {loan.after}, but slot {loan.slot} had loan "
                f"{self._loans[loan.slot]} last."
            )
        self._loans[loan.slot] = number
        self._copied += 1
        self._change(number, SlotState.FILLING)

    def end_copy(self, number: int) -> None:
        """Note that the copy of a loan is complete; raises `SlotError` unless it has its slot."""
        self._expect_own(number, SlotState.FILLING)
        self._change(number, SlotState.FULL)

    def begin_use(self, number: int) -> None:
        """Note that the step begins to read the part of a loan.

        Raises `SlotError` unless the copy is complete and all loans before it came into use.
        """
        self._expect_own(number, SlotState.FULL)
        if number != self._used:
            raise SlotError(f"loan {number} is used instead of loan {self._used}.")
        self._used += 1
        self._change(number, SlotState.IN_USE)

    def end_use(self, number: int) -> None:
        """Note that the step reads the part no more; raises `SlotError` unless it is in use."""
        self._expect_own(number, SlotState.IN_USE)
        self._change(number, SlotState.FREE)

    def integrity(self) -> None:
        """Assert that slots, loans and counts agree; costs a pass over the slots."""
        assert 0 <= self._used <= self._copied <= len(self._plan), "loans are used before copied."
        assert len(self._states) == len(self._loans), "a slot has no state."
        ahead = 0
        for slot, number in enumerate(self._loans):
            state = self._states[slot]
            if number is None:
                assert state == SlotState.FREE, f"slot {slot} is {state.value} without a loan."
                continue
            assert number < self._copied, f"slot {slot} has a loan whose copy has not begun."
            assert self._plan[number].slot == slot, f"loan {number} is in another slot."
            is_ahead = state in {SlotState.FILLING, SlotState.FULL}
            assert is_ahead == (number >= self._used), (
                f"slot {slot} is {state.value}, which the counts of loans contradict."
            )
            ahead += is_ahead
        assert ahead == self._copied - self._used, "a loan has been overwritten before its use."

    def _loan(self, number: int) -> Loan:
        if not 0 <= number < len(self._plan):
            raise SlotError(f"the step has no loan {number}.")
        return self._plan[number]

    def _expect(self, number: int, state: SlotState) -> None:
        slot = self._loan(number).slot
        if self._states[slot] != state:
            raise SlotError(
                f"slot {slot} of loan {number} is {self._states[slot].value}, not {state.value}."
            )

    def _expect_own(self, number: int, state: SlotState) -> None:
        self._expect(number, state)
        slot = self._loan(number).slot
        if self._loans[slot] != number:
            raise SlotError(f"slot {slot} holds loan {self._loans[slot]}, not loan {number}.")

    def _change(self, number: int, state: SlotState) -> None:
        self._states[self._plan[number].slot] = state
        self.integrity()

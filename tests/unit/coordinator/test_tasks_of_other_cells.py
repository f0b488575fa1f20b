"""Tasks that gateways take to another cell and bring back, and those they want to take."""

import msgspec

from coordinator.protocol.messages.gateway import ATTEMPTS_PER_CELL, Resubmit, Withdrawn
from coordinator.protocol.messages.rank import Drop, Place
from coordinator.tasks.task import State
from tests.harness.coordinator.builders import submit
from tests.harness.coordinator.pools import A, B, group, messages, placed, pool, state


def test_a_queued_task_is_given_up_for_another_cell() -> None:
    made = pool()
    made.submit(submit(A), 0)
    assert messages(made.withdraw(A)) == [Withdrawn(A)]
    assert state(made, A) is None
    assert made.place([group()], 0) == []


def test_a_task_that_a_rank_has_or_had_stays() -> None:
    made = placed(A)
    assert made.withdraw(A) == []
    assert state(made, A) is State.PLACED
    assert made.withdraw(B) == []
    begun = msgspec.structs.replace(submit(B), delivered_tokens=(1,), attempt=1)
    asked = messages(made.submit(begun, 0))
    made.submit(msgspec.structs.replace(begun, attempt=asked[0].attempt), 0)  # type: ignore[attr-defined]
    assert state(made, B) is State.QUEUED
    assert made.withdraw(B) == []


def test_a_gateway_that_missed_the_answer_gets_its_task_back() -> None:
    made = pool()
    made.submit(submit(A), 0)
    made.withdraw(A)
    made.submit(msgspec.structs.replace(submit(A), attempt=1), 0)
    assert state(made, A) is State.QUEUED


def test_a_task_comes_back_from_another_cell_behind_what_was_delivered_there() -> None:
    made = placed(A)
    made.release(A)
    again = msgspec.structs.replace(
        submit(A), delivered_tokens=(7, 8), attempt=2 * ATTEMPTS_PER_CELL
    )
    made.submit(again, 0)
    assert state(made, A) is State.QUEUED
    (place,) = messages(made.place([group()], 0))
    assert isinstance(place, Place)
    assert place.attempt > 2 * ATTEMPTS_PER_CELL
    assert place.generated_tokens == (7, 8)
    # What an earlier session still says of the time before changes nothing.
    made.submit(msgspec.structs.replace(submit(A), attempt=1), 0)
    assert state(made, A) is State.PLACED


def test_what_was_not_cancelled_before_it_came_back_starts_behind_the_delivered_tokens() -> None:
    for is_placed in (False, True):
        made = pool()
        made.submit(submit(A), 0)
        if is_placed:
            made.place([group()], 0)
        again = msgspec.structs.replace(
            submit(A), delivered_tokens=(7,), attempt=2 * ATTEMPTS_PER_CELL
        )
        said = messages(made.submit(again, 0))
        assert any(isinstance(each, Drop) for each in said) == is_placed
        asked = said[-1]
        assert isinstance(asked, Resubmit)
        made.submit(msgspec.structs.replace(again, attempt=asked.attempt), 0)
        (place,) = messages(made.place([group()], 0))
        assert isinstance(place, Place)
        assert place.generated_tokens == (7,)
        assert place.attempt > asked.attempt

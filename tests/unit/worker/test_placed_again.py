"""A task that is placed on a rank which leads it already."""

import pytest

from coordinator.protocol.terms import EndCause, TaskId
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import PROMPT, FakeRank, binding_of
from tests.harness.worker.fake_scheduler import token_at

ALONE = binding_of(0, 1, 1)
TASK = TaskId("a")


@pytest.fixture
def rank() -> FakeRank:
    """It leads a task that has got two tokens in its second attempt."""
    made = FakeRank(FakeCell(1))
    made.serve(ALONE)
    made.place("a", ALONE, attempt=2)
    made.step()
    made.step()
    return made


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_repeated_message_changes_nothing(rank: FakeRank, attempt: int) -> None:
    rank.place("a", ALONE, attempt=attempt)
    led = rank.runtime.book.get(TASK)
    assert led is not None
    assert (led.attempt, led.emitted) == (2, 2)
    assert not rank.runtime.ended


def test_a_later_attempt_takes_the_place_of_one_that_came_with_a_move(rank: FakeRank) -> None:
    """Its gateway has asked for it again meanwhile, and takes tokens of the later one alone."""
    first = token_at(PROMPT, len(PROMPT))
    rank.place("a", ALONE, attempt=4, generated=(first,))
    led = rank.runtime.book.get(TASK)
    assert led is not None
    assert (led.attempt, led.emitted) == (4, 1)
    ended = [(each.task, each.attempt, each.cause) for each in rank.runtime.ended]
    assert ended == [(TASK, 2, EndCause.CANCELLED)]
    rank.streams["a"] = [first]
    rank.step()
    rank.step()
    rank.runtime.steps.finish_inflight()
    wanted = [token_at(PROMPT, len(PROMPT) + number) for number in range(3)]
    assert rank.streams["a"] == wanted

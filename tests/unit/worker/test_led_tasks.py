"""The tasks that a rank leads, and how their tokens are counted."""

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from worker.rank.led_tasks import LedTask, LedTasks

A = TaskId("a")
GROUP = Group((Rank(0),), Mode.DP)


def header() -> TaskHeader:
    return TaskHeader(A, "g", "tcp://here", 3, 9, Tier.STANDARD)


def test_the_wait_is_told_with_the_first_token_alone() -> None:
    book = LedTasks()
    led = LedTask(header(), 1, GROUP, 0, b"", waited_ms=12)
    assert book.emit(led, 2, finished=False) == TokenSpan(A, 1, 0, 2, False, 12)
    assert book.emit(led, 1, finished=True) == TokenSpan(A, 1, 2, 1, True)


def test_a_task_goes_on_behind_the_tokens_of_earlier_attempts() -> None:
    book = LedTasks()
    led = LedTask(header(), 2, GROUP, 4, b"", waited_ms=12)
    assert book.emit(led, 1, finished=False) == TokenSpan(A, 2, 4, 1, False)

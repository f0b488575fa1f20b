"""A task's state, and what it has got since."""

import msgspec
import numpy as np
import pytest

from worker.rank.task_state import RunningState, StateChange

BEFORE = RunningState(
    "a", msgspec.msgpack.encode([5, 6, 7]), 3, 12, 11, np.array([1, 2]), [b"x"], "stats", 1
)
PROGRESS = StateChange([8, 9], [b"y"], 14, 13, None)


def test_a_later_state_has_all_that_came_since() -> None:
    now = BEFORE.later(PROGRESS)
    assert (now.task, now.count, now.computed, now.settled) == ("a", 5, 14, 13)
    assert (now.hashes, now.prefill_stats, now.preemptions) == ([b"x", b"y"], None, 1)
    assert now.blocks is BEFORE.blocks
    assert now.later(StateChange([1], [], 15, 14, None)).tokens() == [5, 6, 7, 8, 9, 1]
    assert BEFORE.tokens() == [5, 6, 7], "it is not changed"


@pytest.mark.parametrize("first", range(7))
def test_tokens_are_told_from_any_one_on(first: int) -> None:
    assert BEFORE.tokens(first) == [5, 6, 7][first:]
    assert BEFORE.later(PROGRESS).tokens(first) == [5, 6, 7, 8, 9][first:]

"""Old tasks that a switch waits for."""

from comm_pool.layout import Rank
from coordinator.protocol.terms import TaskId
from coordinator.switching.stragglers import Stragglers

TASKS = {Rank(0): [TaskId("a"), TaskId("b")], Rank(1): [], Rank(2): [TaskId("c")]}


def waiting() -> Stragglers:
    stragglers = Stragglers()
    stragglers.start([Rank(0), Rank(1), Rank(2)], TASKS.__getitem__)
    return stragglers


def test_a_leader_is_idle_when_its_old_tasks_have_ended() -> None:
    stragglers = waiting()
    assert [stragglers.is_idle(Rank(rank)) for rank in range(4)] == [False, True, False, False]
    assert stragglers.ended(Rank(0), TaskId("a"))
    assert not stragglers.is_idle(Rank(0))
    assert stragglers.ended(Rank(0), TaskId("b"))
    assert stragglers.is_idle(Rank(0))
    assert not stragglers.are_done
    assert stragglers.ended(Rank(2), TaskId("c"))
    assert stragglers.are_done


def test_only_what_is_waited_for_counts() -> None:
    stragglers = waiting()
    assert not stragglers.ended(Rank(1), TaskId("new"))
    assert not stragglers.ended(Rank(2), TaskId("a"))
    assert not stragglers.ended(Rank(7), TaskId("a"))
    stragglers.ended(Rank(2), TaskId("c"))
    assert not stragglers.ended(Rank(2), TaskId("c")), "it ended before"


def test_tasks_that_left_their_leader_are_waited_for_no_more() -> None:
    stragglers = waiting()
    left = {**TASKS, Rank(0): [TaskId("b"), TaskId("new")], Rank(2): []}
    stragglers.prune(left.__getitem__)
    assert stragglers.is_idle(Rank(2))
    assert not stragglers.is_idle(Rank(0))
    assert stragglers.ended(Rank(0), TaskId("b"))
    assert stragglers.are_done


def test_at_first_nobody_is_idle() -> None:
    assert not Stragglers().is_idle(Rank(0))
    assert Stragglers().are_done

"""The life of a task in the pool, one situation per test."""

from dataclasses import replace

import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import ToRank
from coordinator.protocol.messages.gateway import Resubmit, TaskFailed
from coordinator.protocol.messages.rank import Drop, GiveBack, Place
from coordinator.protocol.messages.tasks import Adopted, TaskProgress
from coordinator.protocol.terms import Binding, Carry, EndCause, ReturnCause, Tier
from coordinator.tasks.placement import OpenGroup
from coordinator.tasks.task import ATTEMPTS_APART, FAILURES, State
from tests.harness.coordinator.builders import header, submit
from tests.harness.coordinator.pools import (
    TWO,
    ZERO,
    A,
    B,
    ended,
    group,
    messages,
    placed,
    pool,
    returned,
    state,
)


def test_a_task_is_placed_with_its_payload_and_ends() -> None:
    tasks = pool()
    assert tasks.submit(submit("a"), 0) == []
    assert state(tasks, A) is State.QUEUED
    (effect,) = tasks.place([group()], 30)
    assert isinstance(effect, ToRank)
    assert effect.message == Place(header("a"), 1, group().binding, b"a", (), waited_ms=30)
    assert state(tasks, A) is State.PLACED
    assert tasks.ended(ZERO, ended(A, 1)) == []
    assert state(tasks, A) is None


def test_submitting_again_changes_nothing() -> None:
    tasks = placed("a")
    assert tasks.submit(submit("a", attempt=1), 1) == []
    assert tasks.place([group()], 1) == []
    tasks.ended(ZERO, ended(A, 1))
    assert tasks.submit(submit("a", attempt=1), 2) == [], "its last tokens are on their way"
    assert len(tasks.tasks) == 0


def test_the_gateway_may_be_first_to_know_the_end() -> None:
    tasks = placed("a")
    assert tasks.release(A, is_done=True) == [], "its only leader has ended it by itself"
    assert len(tasks.tasks) == 0
    assert tasks.ended(ZERO, ended(A, 1)) == []


def test_the_end_of_an_earlier_attempt_drops_the_later_one() -> None:
    tasks = placed("a")
    tasks.lost(ZERO, 1)
    tasks.submit(submit("a", attempt=2), 2)
    tasks.place([group(TWO)], 2)
    assert tasks.release(A, is_done=True) == [ToRank(TWO, Drop(A, 3))]


def test_a_task_that_has_moved_is_dropped_at_its_end() -> None:
    tasks = placed("a")
    tasks.adopted(TWO, Adopted(A, 2, 4), 2)
    assert tasks.release(A, is_done=True) == [ToRank(TWO, Drop(A, 2))]


def test_a_cancelled_task_is_dropped_by_whoever_holds_it() -> None:
    tasks = placed("a")
    tasks.submit(submit("b"), 0)
    assert tasks.release(A) == [ToRank(ZERO, Drop(A, 1))]
    assert tasks.release(B) == []
    assert tasks.release(A) == []
    assert len(tasks.tasks) == 0


def test_too_many_tasks_are_refused() -> None:
    tasks = pool()
    for number in range(3):
        assert tasks.submit(submit(str(number)), 0) == []
    (failure,) = messages(tasks.submit(submit("a"), 0))
    assert isinstance(failure, TaskFailed)
    assert failure.code == "queue_full"
    assert messages(tasks.submit(submit("a", attempt=4), 0)) == [Resubmit(A, 4 + ATTEMPTS_APART)], (
        "a stream that has begun is not refused"
    )


def test_a_task_too_long_for_every_group_is_refused_with_the_largest_context() -> None:
    (failure,) = messages(pool().submit(submit("a", prompt=100, max_tokens=61), 0))
    assert isinstance(failure, TaskFailed)
    assert failure.code == "context_length_exceeded"
    assert "largest context here is 160 tokens" in failure.message
    assert "asks for 161" in failure.message


def test_queued_tasks_that_became_too_long_fail() -> None:
    tasks = pool()
    tasks.submit(submit("a", prompt=100), 0)
    tasks.submit(submit("b"), 0)
    tasks.context_tokens_max = 50
    (failure,) = messages(tasks.recheck_context())
    assert isinstance(failure, TaskFailed)
    assert failure.task == A
    assert state(tasks, B) is State.QUEUED


def test_a_deadline_ends_a_task_wherever_it_is() -> None:
    tasks = placed("b")
    tasks.submit(submit("a", deadline_ms=10), 0)
    assert tasks.tick(9) == []
    (failure,) = messages(tasks.tick(10))
    assert isinstance(failure, TaskFailed)
    assert failure.code == "deadline_exceeded"
    tasks.submit(submit("c", deadline_ms=10), 10)
    tasks.place([group()], 10)
    assert [type(each) for each in messages(tasks.tick(20))] == [Drop, TaskFailed]
    assert state(tasks, B) is State.PLACED


@pytest.mark.parametrize("cause", FAILURES)
def test_a_failure_is_told_again_to_a_gateway_that_missed_it(cause: EndCause) -> None:
    tasks = placed("a")
    told = messages(tasks.ended(ZERO, ended(A, 1, cause)))
    assert told == [TaskFailed(A, *FAILURES[cause])]
    assert messages(tasks.submit(submit("a", attempt=1), 1)) == told


def test_the_least_loaded_group_takes_the_task() -> None:
    tasks = pool()
    tasks.submit(submit("a", prompt=50), 0)
    tasks.submit(submit("b"), 0)
    tasks.submit(submit("c"), 0)
    effects = tasks.place([group(ZERO), group(TWO)], 0)
    assert [effect.rank for effect in effects if isinstance(effect, ToRank)] == [0, 2, 2]


def test_a_wide_group_counts_its_ranks() -> None:
    pair = OpenGroup(Binding(Group((ZERO, Rank(1)), Mode.TP), 1), 4, 20, 16)
    tasks = pool()
    for name, prompt in (("a", 40), ("b", 30), ("c", 10)):
        tasks.submit(submit(name, prompt=prompt), 0)
    effects = tasks.place([pair, group(TWO)], 0)
    assert [effect.rank for effect in effects if isinstance(effect, ToRank)] == [0, 2, 0]


def test_a_group_takes_no_more_tasks_than_it_holds() -> None:
    tasks = pool()
    tasks.submit(submit("a"), 0)
    tasks.submit(submit("b"), 0)
    assert len(tasks.place([group(max_tasks=1)], 0)) == 1
    assert tasks.place([group(max_tasks=1)], 0) == []
    tasks.ended(ZERO, ended(A, 1))
    assert len(tasks.place([group(max_tasks=1)], 0)) == 1


def test_a_task_waits_for_a_group_that_could_ever_hold_it() -> None:
    tasks = pool()
    tasks.submit(submit("a", prompt=100, max_tokens=50), 0)
    assert tasks.place([group(blocks=9)], 0) == []
    assert len(tasks.place([group(blocks=10)], 0)) == 1


def test_growth_counts_against_room() -> None:
    tasks = placed("a")
    tasks.submit(submit("b", prompt=20), 0)
    tasks.progress(ZERO, [TaskProgress(A, 110, paused=False)], 0)
    assert tasks.place([group()], 0) == []
    assert len(tasks.place([group(TWO)], 0)) == 1


def test_a_blocked_task_claims_its_group_and_others_use_the_rest() -> None:
    tasks = placed("a", leader=ZERO)
    tasks.progress(ZERO, [TaskProgress(A, 100, paused=False)], 0)
    tasks.submit(submit("long", prompt=120, tier=Tier.INTERACTIVE), 0)
    tasks.submit(submit("b"), 0)
    small = group(TWO, blocks=4)
    (effect,) = tasks.place([group(ZERO), small], 0)
    assert isinstance(effect, ToRank)
    assert effect.rank == TWO, "rank 0 is what `long` waits for"
    assert tasks.place([group(ZERO)], 0) == []


def test_tasks_that_fit_nowhere_do_not_block_the_others() -> None:
    tasks = pool()
    tasks.submit(submit("long", prompt=120), 0)
    tasks.submit(submit("a"), 0)
    (effect,) = messages(tasks.place([group(blocks=4)], 0))
    assert isinstance(effect, Place)
    assert effect.header.task == A


def test_nothing_is_placed_without_open_groups() -> None:
    tasks = pool()
    tasks.submit(submit("a"), 0)
    assert tasks.place([], 0) == []


def test_a_returned_task_goes_on_behind_its_tokens_in_a_new_attempt() -> None:
    tasks = placed("a")
    tasks.returned(ZERO, returned(A, 1, 7, 8), 1)
    (place,) = messages(tasks.place([group(TWO)], 1))
    assert isinstance(place, Place)
    assert (place.attempt, place.generated_tokens) == (2, (7, 8))


def test_a_returned_task_stands_where_it_stood() -> None:
    tasks = placed("a")
    tasks.submit(submit("b"), 5)
    tasks.returned(ZERO, returned(A, 1), 6)
    (place,) = messages(tasks.place([group(max_tasks=1)], 6))
    assert isinstance(place, Place)
    assert place.header.task == A


def test_words_about_earlier_attempts_or_of_other_ranks_say_nothing() -> None:
    tasks = placed("a")
    tasks.returned(ZERO, returned(A, 1, 7), 1)
    tasks.place([group(TWO)], 1)
    for rank, attempt in ((ZERO, 1), (TWO, 1), (ZERO, 2)):
        assert tasks.ended(rank, ended(A, attempt)) == []
        assert tasks.returned(rank, returned(A, attempt, 9, 9), 2) == []
    assert state(tasks, A) is State.PLACED


def test_a_task_paused_for_too_long_is_asked_back_once() -> None:
    tasks = placed("a")
    tasks.progress(ZERO, [TaskProgress(A, 3, paused=True)], 10)
    assert state(tasks, A) is State.PAUSED
    assert tasks.tick(109) == []
    assert messages(tasks.tick(110)) == [GiveBack(A)]
    assert state(tasks, A) is State.RETURNING
    assert tasks.tick(500) == []
    tasks.returned(ZERO, returned(A, 1, 1, 2, 3), 501)
    assert state(tasks, A) is State.QUEUED
    assert tasks.take_carried() == {Carry.PAUSE: 1}


def test_a_task_that_runs_again_in_time_stays() -> None:
    tasks = placed("a")
    tasks.progress(ZERO, [TaskProgress(A, 3, paused=True)], 10)
    tasks.progress(ZERO, [TaskProgress(A, 3, paused=False)], 100)
    assert tasks.tick(500) == []
    assert state(tasks, A) is State.PLACED


def test_recomputed_tasks_are_counted_for_the_switch() -> None:
    tasks = placed("a", "b")
    tasks.returned(ZERO, returned(A, 1, 7), 1)
    tasks.returned(ZERO, returned(B, 1, cause=ReturnCause.NOT_STARTED), 1)
    assert tasks.take_carried() == {Carry.RECOMPUTE: 1}
    assert tasks.take_carried() == {}


def test_a_moved_task_goes_on_with_its_new_leader() -> None:
    tasks = placed("a")
    assert tasks.adopted(TWO, Adopted(A, 2, 4), 1) == []
    task = tasks.tasks[A]
    assert (task.leader, task.attempt, task.generated) == (TWO, 2, 4)
    assert tasks.returned(ZERO, returned(A, 1, 7), 2) == [], "the old leader is not heard"
    assert state(tasks, A) is State.PLACED
    assert tasks.adopted(TWO, Adopted(A, 2, 4), 3) == [], "told again"
    assert tasks.take_carried()[Carry.RESHARD] == 1


def test_a_paused_task_that_is_moved_runs_again() -> None:
    tasks = placed("a")
    tasks.progress(ZERO, [TaskProgress(A, 2, paused=True)], 1)
    tasks.adopted(TWO, Adopted(A, 2, 2), 2)
    assert state(tasks, A) is State.PLACED
    assert tasks.tick(500) == [], "nobody has to give it back"


def test_a_task_that_ended_or_was_given_up_is_not_adopted() -> None:
    tasks = placed("a", "b")
    tasks.release(A)
    tasks.returned(ZERO, returned(B, 1, 7), 1)
    assert tasks.adopted(TWO, Adopted(A, 2, 4), 2) == [ToRank(TWO, Drop(A, 2))]
    # Tokens of that attempt must not count, whoever makes some before it hears.
    assert messages(tasks.adopted(TWO, Adopted(B, 2, 4), 2)) == [Drop(B, 2), Resubmit(B, 3)]
    assert state(tasks, B) is State.ASKED
    assert messages(tasks.adopted(TWO, Adopted(B, 2, 4), 3)) == [Drop(B, 2)]


def test_what_waits_in_a_group_reserved_for_others_is_taken_back() -> None:
    tasks = placed(A, B)
    tasks.tasks.grow(tasks.tasks[B], 1, 0)
    reserved = replace(group(ZERO), reserved_tiers=1)
    assert tasks.vacate([reserved], 1) == [], "they fit nowhere else"
    assert tasks.vacate([group(ZERO), group(TWO)], 1) == []
    effects = tasks.vacate([reserved, group(TWO)], 1)
    assert effects == [ToRank(ZERO, GiveBack(A))], "B has begun"
    assert state(tasks, A) is State.RETURNING
    assert tasks.vacate([reserved, group(TWO)], 2) == [], "it is on its way"


def test_urgent_tasks_stay_in_a_group_reserved_for_them() -> None:
    tasks = pool()
    tasks.submit(submit(A, tier=Tier.INTERACTIVE), 0)
    tasks.place([group(ZERO)], 0)
    assert tasks.vacate([replace(group(ZERO), reserved_tiers=1), group(TWO)], 1) == []

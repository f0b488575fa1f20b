"""The life of a task in the pool, one situation per test."""

from collections.abc import Sequence

from comm_pool.layout import Group, Mode, Rank
from coordinator.events import Effect, ToGateway, ToRank
from coordinator.placement import OpenGroup
from coordinator.protocol.messages import (
    Binding,
    Carry,
    Drop,
    EndCause,
    GiveBack,
    HeldTask,
    Message,
    Place,
    Resubmit,
    ReturnCause,
    TaskEnded,
    TaskFailed,
    TaskId,
    TaskProgress,
    TaskReturned,
    Tier,
)
from coordinator.task_pool import ATTEMPTS_APART, PoolLimits, TaskPool
from coordinator.tasks import State
from tests.unit.coordinator.builders import header, hello, submit

ZERO, TWO = Rank(0), Rank(2)
A, B = TaskId("a"), TaskId("b")
LIMITS = PoolLimits(queue_tasks_max=3, ageing_ms=1_000, pause_limit_ms=100, claim_ms=50)


def group(leader: Rank = ZERO, *, blocks: int = 10, max_tasks: int = 4) -> OpenGroup:
    return OpenGroup(Binding(Group((leader,), Mode.DP), 1), max_tasks, blocks, 16)


def pool(*, recovering: bool = False) -> TaskPool:
    made = TaskPool(LIMITS)
    made.context_tokens_max = 160
    if not recovering:
        made.recovered(0)
    return made


def placed(*tasks: str, leader: Rank = ZERO) -> TaskPool:
    """A pool with these tasks placed at one leader, as their first attempts."""
    made = pool()
    for task in tasks:
        made.submit(submit(task), 0)
    assert len(made.place([group(leader)], 0)) == len(tasks)
    return made


def state(of: TaskPool, task: TaskId) -> State | None:
    of.integrity()
    found = of.tasks.get(task)
    return found.state if found else None


def messages(effects: Sequence[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, ToRank | ToGateway)]


def ended(task: TaskId, attempt: int, cause: EndCause = EndCause.FINISHED) -> TaskEnded:
    return TaskEnded(task, attempt, cause, 3, "because")


def returned(
    task: TaskId, attempt: int, *tokens: int, cause: ReturnCause = ReturnCause.RECOMPUTE
) -> TaskReturned:
    return TaskReturned(task, attempt, cause, tokens)


def test_a_task_is_placed_with_its_payload_and_ends() -> None:
    tasks = pool()
    assert tasks.submit(submit("a"), 0) == []
    assert state(tasks, A) is State.QUEUED
    (effect,) = tasks.place([group()], 0)
    assert isinstance(effect, ToRank)
    assert effect.message == Place(header("a"), 1, group().binding, b"a", ())
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
    assert messages(tasks.release(A)) == [Drop(A)]
    assert tasks.ended(ZERO, ended(A, 1)) == []


def test_a_cancelled_task_is_dropped_by_whoever_holds_it() -> None:
    tasks = placed("a")
    tasks.submit(submit("b"), 0)
    assert tasks.release(A) == [ToRank(ZERO, Drop(A))]
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


def test_a_failure_is_told_again_to_a_gateway_that_missed_it() -> None:
    tasks = placed("a")
    told = messages(tasks.ended(ZERO, ended(A, 1, EndCause.REFUSED)))
    assert told == [TaskFailed(A, "invalid_value", "because")]
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


def test_a_lost_ranks_tasks_are_submitted_again_by_their_gateway() -> None:
    tasks = placed("a")
    assert messages(tasks.lost(ZERO, 1)) == [Drop(A), Resubmit(A, 2)]
    assert state(tasks, A) is State.ASKED
    again = tasks.submit(submit("a", delivered=[7], attempt=1), 2)
    assert messages(again) == [Resubmit(A, 2)], "sent before the question was read"
    assert tasks.submit(submit("a", delivered=[7, 8], attempt=2), 3) == []
    (place,) = messages(tasks.place([group(TWO)], 3))
    assert isinstance(place, Place)
    assert (place.attempt, place.generated_tokens) == (3, (7, 8))


def test_a_finished_task_whose_last_tokens_may_be_lost_is_asked_for() -> None:
    tasks = placed("a", "b")
    tasks.ended(ZERO, ended(A, 1))
    tasks.ended(ZERO, ended(B, 1))
    tasks.release(B)
    assert messages(tasks.lost(ZERO, 1)) == [Resubmit(A, 2)]
    assert tasks.submit(submit("a", delivered=[7], attempt=2), 2) == []
    assert state(tasks, A) is State.QUEUED
    assert tasks.submit(submit("b", attempt=2), 2) == []
    assert state(tasks, B) is None


def test_what_a_rank_does_not_hold_after_all_is_asked_for() -> None:
    tasks = placed("a", "b")
    assert messages(tasks.reconcile(hello(0, held=[held("b", 1)]), 1)) == [Resubmit(A, 2)]
    assert state(tasks, B) is State.PLACED


def held(task: str, attempt: int, *, paused: bool = False) -> HeldTask:
    return HeldTask(header(task), attempt, Group((ZERO,), Mode.DP), 2, paused)


def test_what_a_rank_should_not_hold_is_dropped() -> None:
    tasks = placed("a")
    tasks.release(A)
    tasks.submit(submit("b"), 0)
    hello_with_both = hello(0, held=[held("a", 1), held("b", 9)])
    assert messages(tasks.reconcile(hello_with_both, 1)) == [Drop(A), Drop(B)]
    assert state(tasks, B) is State.QUEUED


def test_a_task_that_nobody_claims_is_dropped() -> None:
    tasks = pool()
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    assert state(tasks, A) is State.PLACED
    assert tasks.tick(49) == []
    assert messages(tasks.tick(50)) == [Drop(A)]
    assert len(tasks.tasks) == 0


def test_a_gateway_that_is_back_claims_what_it_wants() -> None:
    tasks = placed("a", "b")
    tasks.gateway_opened("g", 0)
    tasks.submit(submit("a", attempt=1), 10)
    assert messages(tasks.tick(50)) == [Drop(B)]
    assert state(tasks, A) is State.PLACED


def test_a_gateway_that_was_given_up_may_come_back() -> None:
    tasks = placed("a")
    assert messages(tasks.gateway_gone("g")) == [Drop(A)]
    assert messages(tasks.submit(submit("a", delivered=[7], attempt=1), 9)) == [Resubmit(A, 2)]
    tasks.submit(submit("a", delivered=[7, 8], attempt=2), 10)
    (place,) = messages(tasks.place([group()], 10))
    assert isinstance(place, Place)
    assert (place.attempt, place.generated_tokens) == (3, (7, 8))


def test_a_held_task_gets_its_payload_from_its_gateway() -> None:
    tasks = pool(recovering=True)
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    tasks.submit(submit("a", attempt=3), 0)
    assert tasks.recovered(1) == []
    assert tasks.tick(1_000) == []
    tasks.returned(ZERO, returned(A, 3, 1, 2, 3), 5)
    (place,) = messages(tasks.place([group()], 5))
    assert isinstance(place, Place)
    assert (place.attempt, place.payload) == (4, b"a")


def test_the_order_of_claim_and_hello_does_not_matter() -> None:
    tasks = pool(recovering=True)
    tasks.submit(submit("a", attempt=1), 0)
    tasks.reconcile(hello(0, held=[held("a", 3, paused=True)]), 0)
    assert tasks.recovered(1) == []
    assert state(tasks, A) is State.PAUSED


def test_a_task_that_nobody_holds_is_asked_for_when_all_are_heard() -> None:
    tasks = pool(recovering=True)
    tasks.submit(submit("a", delivered=[7], attempt=3), 0)
    assert tasks.place([group()], 0) == []
    assert messages(tasks.recovered(1)) == [Resubmit(A, 3 + ATTEMPTS_APART)]
    tasks.submit(submit("a", delivered=[7, 8], attempt=3 + ATTEMPTS_APART), 2)
    (place,) = messages(tasks.place([group()], 2))
    assert isinstance(place, Place)
    assert place.attempt == 3 + ATTEMPTS_APART + 1


def test_a_task_that_was_never_submitted_before_is_not_asked_for() -> None:
    tasks = pool(recovering=True)
    tasks.submit(submit("a"), 0)
    assert tasks.recovered(1) == []
    assert state(tasks, A) is State.QUEUED


def test_an_attempt_that_its_gateway_was_told_to_refuse_is_given_up() -> None:
    for claims_first in (True, False):
        tasks = pool(recovering=True)
        claim = submit("a", delivered=[7], attempt=5)
        if claims_first:
            tasks.submit(claim, 0)
        drops = messages(tasks.reconcile(hello(0, held=[held("a", 4)]), 0))
        if not claims_first:
            drops = messages(tasks.submit(claim, 0))
        assert drops == [Drop(A)]


def test_the_newest_of_two_attempts_that_ranks_hold_is_kept() -> None:
    tasks = pool(recovering=True)
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    assert tasks.reconcile(hello(2, held=[held("a", 4)]), 0) == [ToRank(ZERO, Drop(A))]
    assert tasks.reconcile(hello(1, held=[held("a", 2)]), 0) == [ToRank(Rank(1), Drop(A))]
    assert tasks.tasks[A].leader == TWO


def test_a_task_given_back_before_its_gateway_was_heard_waits_for_it() -> None:
    tasks = pool()
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    assert messages(tasks.returned(ZERO, returned(A, 3, 1, 2), 1)) == [Resubmit(A, 4)]
    assert state(tasks, A) is State.ASKED

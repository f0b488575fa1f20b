"""Tasks of ranks, gateways and coordinators that are lost: what the pool asks for and drops."""

import msgspec
import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import ToGateway, ToRank
from coordinator.protocol.messages.gateway import Resubmit, TaskFailed
from coordinator.protocol.messages.rank import Drop, Place
from coordinator.protocol.messages.tasks import Adopted, HeldTask
from coordinator.tasks.task import ATTEMPTS_APART, LOSSES_MAX, State
from tests.harness.coordinator.builders import header, hello, submit
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


def test_a_lost_ranks_tasks_are_submitted_again_by_their_gateway() -> None:
    tasks = placed("a")
    assert messages(tasks.lost(ZERO, 1)) == [Drop(A, 1), Resubmit(A, 2)]
    assert state(tasks, A) is State.ASKED
    again = tasks.submit(submit("a", delivered=[7], attempt=1), 2)
    assert messages(again) == [Resubmit(A, 2)], "sent before the question was read"
    assert tasks.submit(submit("a", delivered=[7, 8], attempt=2), 3) == []
    (place,) = messages(tasks.place([group(TWO)], 3))
    assert isinstance(place, Place)
    assert (place.attempt, place.generated_tokens) == (3, (7, 8))


def test_a_task_that_is_lost_with_one_rank_after_another_ends() -> None:
    tasks = placed("a")
    for _ in range(LOSSES_MAX):
        *_, asked = messages(tasks.lost(ZERO, 1))
        assert isinstance(asked, Resubmit)
        tasks.submit(submit("a", delivered=[7], attempt=asked.attempt), 2)
        tasks.place([group(ZERO)], 3)
    *_, failed = messages(tasks.lost(ZERO, 4))
    assert isinstance(failed, TaskFailed)
    assert failed.code == "worker_lost"
    assert state(tasks, A) is None
    tasks.integrity()


def test_ranks_that_were_ended_do_not_count_as_losses() -> None:
    tasks = placed("a")
    for _ in range(LOSSES_MAX + 2):
        *_, asked = messages(tasks.lost(ZERO, 1, is_at_fault=False))
        assert isinstance(asked, Resubmit)
        tasks.submit(submit("a", delivered=[7], attempt=asked.attempt), 2)
        tasks.place([group(ZERO)], 3)
    assert state(tasks, A) is State.PLACED
    tasks.integrity()


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


def test_a_rank_that_holds_an_earlier_attempt_has_not_got_the_one_that_it_was_sent() -> None:
    tasks = placed("a")
    (_, asked) = messages(tasks.lost(ZERO, 1))
    assert isinstance(asked, Resubmit)
    tasks.submit(submit("a", delivered=[7], attempt=asked.attempt), 2)
    (place,) = messages(tasks.place([group(ZERO)], 3))
    assert isinstance(place, Place)
    # The session broke: the rank was lost for a moment, and heard neither of that nor of this.
    again = messages(tasks.reconcile(hello(0, held=[held("a", 1)]), 4))
    assert again == [Resubmit(A, place.attempt + 1), Drop(A, 1)]
    assert state(tasks, A) is State.ASKED
    tasks.integrity()


def test_a_task_that_its_late_leader_will_give_away_is_taken_back() -> None:
    """Its migration is committed, but this coordinator has not heard who continues the task."""
    moving = HeldTask(header("a"), 1, Group((ZERO,), Mode.DP), 2, paused=False, moves=True)
    tasks = pool()
    taken_back = messages(tasks.reconcile(hello(0, held=[moving]), 1, has_moved=True))
    assert taken_back == [Drop(A, 1), Resubmit(A, 2)]
    assert messages(pool().reconcile(hello(0, held=[moving]), 1, has_moved=False)) == []


def held(task: str, attempt: int, *, paused: bool = False) -> HeldTask:
    return HeldTask(header(task), attempt, Group((ZERO,), Mode.DP), 2, paused)


def test_what_a_rank_should_not_hold_is_dropped() -> None:
    tasks = placed("a")
    tasks.release(A)
    tasks.submit(submit("b"), 0)
    hello_with_both = hello(0, held=[held("a", 1), held("b", 9)])
    assert messages(tasks.reconcile(hello_with_both, 1)) == [Drop(A, 1), Drop(B, 9)]
    assert state(tasks, B) is State.QUEUED


def test_a_task_that_nobody_claims_is_dropped() -> None:
    tasks = pool()
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    assert state(tasks, A) is State.PLACED
    assert tasks.tick(49) == []
    assert messages(tasks.tick(50)) == [Drop(A, 3)]
    assert len(tasks.tasks) == 0


def test_a_gateway_that_is_back_claims_what_it_wants() -> None:
    tasks = placed("a", "b")
    tasks.gateway_opened("g", 0)
    tasks.submit(submit("a", attempt=1), 10)
    assert messages(tasks.tick(50)) == [Drop(B, 1)]
    assert state(tasks, A) is State.PLACED


def test_a_gateway_that_was_given_up_may_come_back() -> None:
    tasks = placed("a")
    assert messages(tasks.gateway_gone("g")) == [Drop(A, 1)]
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


def test_a_task_that_was_held_and_not_claimed_waits_for_its_gateway() -> None:
    tasks = pool(recovering=True)
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    tasks.lost(ZERO, 0)
    assert messages(tasks.recovered(1)) == [Resubmit(A, 4)]
    assert state(tasks, A) is State.ASKED


def test_an_attempt_that_its_gateway_was_told_to_refuse_is_given_up() -> None:
    for claims_first in (True, False):
        tasks = pool(recovering=True)
        claim = submit("a", delivered=[7], attempt=5)
        if claims_first:
            tasks.submit(claim, 0)
        drops = messages(tasks.reconcile(hello(0, held=[held("a", 4)]), 0))
        if not claims_first:
            drops = messages(tasks.submit(claim, 0))
        assert drops == [Drop(A, 4)]
        # The tokens of the fifth attempt may still be under way, or its rank come late.
        (question,) = messages(tasks.recovered(1))
        assert isinstance(question, Resubmit)
        assert question.attempt > 5


@pytest.mark.parametrize("claims_first", [True, False])
def test_an_attempt_of_the_number_that_its_gateway_was_told_to_refuse_is_given_up(
    *, claims_first: bool
) -> None:
    """A coordinator asked under the number of an attempt whose rank it had not heard."""
    tasks = pool(recovering=True)
    claim = submit("a", delivered=[7], attempt=5, void_attempt=5)
    holder = hello(0, held=[held("a", 5)])
    if claims_first:
        tasks.submit(claim, 0)
        drops = messages(tasks.reconcile(holder, 0))
    else:
        tasks.reconcile(holder, 0)
        drops = messages(tasks.submit(claim, 0))
    assert drops == [Drop(A, 5)]
    (question,) = messages(tasks.recovered(1))
    assert isinstance(question, Resubmit)
    assert question.attempt > 5


def test_an_attempt_that_its_gateway_takes_tokens_of_is_kept() -> None:
    tasks = pool(recovering=True)
    tasks.submit(submit("a", delivered=[7], attempt=5, void_attempt=4), 0)
    assert tasks.reconcile(hello(0, held=[held("a", 5)]), 0) == []
    assert state(tasks, A) is State.PLACED


def test_the_newest_of_two_attempts_that_ranks_hold_is_kept() -> None:
    tasks = pool(recovering=True)
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    assert tasks.reconcile(hello(2, held=[held("a", 4)]), 0) == [ToRank(ZERO, Drop(A, 3))]
    assert tasks.reconcile(hello(1, held=[held("a", 2)]), 0) == [ToRank(Rank(1), Drop(A, 2))]
    assert tasks.tasks[A].leader == TWO


def test_a_task_given_back_before_its_gateway_was_heard_waits_for_it() -> None:
    tasks = pool()
    tasks.reconcile(hello(0, held=[held("a", 3)]), 0)
    assert messages(tasks.returned(ZERO, returned(A, 3, 1, 2), 1)) == [Resubmit(A, 4)]
    assert state(tasks, A) is State.ASKED


def moved(*, generated: int = 4) -> Adopted:
    return Adopted(A, 2, generated)


def test_a_former_leader_that_is_lost_may_have_taken_tokens_with_it() -> None:
    tasks = placed("a")
    tasks.adopted(TWO, moved(), 1)
    assert tasks.lost(ZERO, 2) == [ToRank(TWO, Drop(A, 2)), ToGateway("g", Resubmit(A, 3))]
    tasks.submit(submit("a", delivered=[7], attempt=3), 3)
    assert tasks.lost(ZERO, 4) == [], "what the gateway has is behind it now"


def test_a_rank_that_gave_a_task_back_may_be_lost_with_its_tokens() -> None:
    tasks = placed("a", "b")
    tasks.returned(ZERO, returned(A, 1, 7), 1)
    tasks.returned(ZERO, returned(B, 1), 1)
    assert messages(tasks.lost(ZERO, 2)) == [Resubmit(A, 2)], "it made no token of the other"


def test_an_ended_task_may_return_when_a_former_leader_is_lost() -> None:
    tasks = placed("a")
    tasks.adopted(TWO, moved(), 1)
    tasks.ended(TWO, ended(A, 2))
    assert messages(tasks.lost(ZERO, 2)) == [Resubmit(A, 3)]


def test_what_a_rank_adopts_without_having_heard_is_not_doubted() -> None:
    tasks = placed("a")
    tasks.adopted(TWO, moved(), 1)
    unaware = msgspec.structs.replace(hello(2), adopted=(moved(),), adopted_in=5)
    assert tasks.reconcile(unaware, 2, has_moved=True) == []
    assert state(tasks, A) is State.PLACED
    assert messages(tasks.reconcile(hello(2), 3)) == [Resubmit(A, 3)], "it has given up the task"


def test_a_leader_that_has_not_heard_of_its_move_drops_no_later_attempt() -> None:
    tasks = placed("a")
    tasks.adopted(ZERO, moved(), 1)
    unaware = msgspec.structs.replace(
        hello(0, held=[held("a", 1)]), adopted=(moved(),), adopted_in=5
    )
    assert tasks.reconcile(unaware, 2, has_moved=True) == [ToRank(ZERO, Drop(A, 1))]
    assert tasks.tasks[A].attempt == 2


def test_a_task_that_was_given_back_in_a_move_is_not_taken_for_moved() -> None:
    """The rank said so in the session that is gone, and its move was not committed."""
    tasks = placed("a")
    undecided = msgspec.structs.replace(hello(0), adopted=(moved(),), adopted_in=5)
    assert messages(tasks.reconcile(undecided, 1)) == [Resubmit(A, 2)]
    assert tasks.adopted(ZERO, moved(), 2) == [ToRank(ZERO, Drop(A, 2))], "it was asked for"

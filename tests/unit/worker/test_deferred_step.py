"""A step that is planned before a group is left, and computed when the switch has time for it."""

import time
from typing import Any

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from tests.harness.worker.fake_scheduler import token_at
from tests.harness.worker.stepping_rank import DP, TP, Stage, task_of
from worker.io.host import HOST
from worker.io.step_queue import Step
from worker.rank import steps
from worker.rank.steps import DeferredStep

JOINED: Any = (TP, {Rank(0): 1, Rank(1): 1})


def on_cpu() -> Stage:
    """A rank in the pair, whose steps are over when they were launched."""
    stage = Stage()
    stage.engine.is_synchronous = True
    stage.select(TP)
    return stage


def hold(stage: Stage) -> None:
    """Defer a step as the leader."""
    stage.steps.defer(stage.tp, TP, 4)


def leave(stage: Stage) -> None:
    stage.steps.on_leave(JOINED)
    stage.selected = None


def held(leads: bool) -> Stage:
    """A rank whose step is deferred."""
    stage = on_cpu()
    if leads:
        hold(stage)
    else:
        stage.follow(TP, is_held=True)
    return stage


def test_it_is_sent_when_it_is_planned_and_computed_when_asked_for() -> None:
    stage = held(leads=True)
    (sent,) = stage.sent
    assert isinstance(sent, Step)
    assert (sent.formation, sent.is_held) == (TP.formation, True)
    leave(stage)
    stage.steps.finish_detached_if_ready()
    assert (stage.steps.has_deferred_step, stage.steps.has_detached_step) == (True, True)
    assert (stage.tp.computed, stage.pushed) == (0, [])
    stage.steps.run_deferred()
    assert (stage.tp.computed, stage.pushed) == (1, [(4, ["tp task"])]), "in the epoch of its group"
    assert (stage.steps.has_deferred_step, stage.steps.has_inflight) == (False, False)
    assert stage.steps.take_detached_end_ns() == stage.steps.ended_ns
    stage.steps.run_deferred()
    assert stage.tp.computed == 1, "once"


def test_whoever_needs_its_tokens_computes_it() -> None:
    stage = held(leads=True)
    leave(stage)
    stage.steps.finish_inflight()
    assert (stage.tp.computed, stage.pushed) == (1, [(4, ["tp task"])])
    assert not stage.steps.has_deferred_step
    stage.steps.run_deferred()
    assert stage.tp.computed == 1


def test_the_rank_is_in_its_group_until_it_is_computed() -> None:
    stage = held(leads=True)
    leave(stage)
    assert list(stage.steps.draining_groups) == [JOINED]
    stage.steps.run_deferred()
    assert list(stage.steps.draining_groups) == []


def test_how_long_it_was_held_does_not_count_as_a_part_of_it() -> None:
    stage = held(leads=True)
    leave(stage)
    time.sleep(0.02)
    caught_up_ns = time.monotonic_ns()
    stage.steps.run_deferred()
    ((began_ns, ended_ns),) = stage.log.times
    assert caught_up_ns <= began_ns <= ended_ns
    assert stage.expected == [], "others leave when it is planned, not when it is over"


def test_it_is_late_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = on_cpu()
    seen = [stage.steps.is_late]
    hold(stage)
    for limit_s in (60.0, -1.0):
        monkeypatch.setattr(steps, "DEFER_LIMIT_S", limit_s)
        seen.append(stage.steps.is_late)
    stage.steps.run_deferred()
    assert [*seen, stage.steps.is_late] == [False, False, True, False]


def test_a_leader_that_stays_computes_it_before_it_plans_another() -> None:
    stage = held(leads=True)
    stage.step(TP, 5)
    assert stage.tp.computed == 2
    assert stage.pushed == [(4, ["tp task"]), (5, ["tp task"])]
    assert task_of(stage.tp).tokens == [token_at([1, 2, 3], position) for position in (3, 4)]


def test_a_follower_computes_it_when_asked() -> None:
    stage = held(leads=False)
    leave(stage)
    assert (stage.tp.computed, stage.steps.has_deferred_step, stage.steps.ended_ns) == (0, True, 0)
    assert list(stage.steps.draining_groups) == [JOINED]
    assert not stage.steps.has_detached_step, "it has no tokens to take"
    stage.steps.run_deferred()
    assert (stage.tp.computed, stage.steps.has_deferred_step) == (1, False)
    assert [*stage.steps.draining_groups, *stage.pushed, *stage.lost_groups] == []


@pytest.mark.parametrize(
    ("leads", "asks"), [(True, "run_deferred"), (True, "finish_inflight"), (False, "run_deferred")]
)
def test_one_that_lacks_a_member_is_given_up_once_its_group_is_left(leads: bool, asks: str) -> None:
    stage = held(leads)
    stage.abort(closes=False)
    leave(stage)
    getattr(stage.steps, asks)()
    assert stage.lost_groups == [TP.group]
    assert (stage.steps.has_deferred_step, stage.steps.has_inflight) == (False, False)
    assert (stage.steps.draining_groups, stage.pushed) == ((), [])


@pytest.mark.parametrize(
    ("leads", "asks"), [(True, "run_deferred"), (True, "finish_inflight"), (False, "run_deferred")]
)
def test_one_without_room_is_given_up_for_all_members(leads: bool, asks: str) -> None:
    stage = held(leads)
    stage.engine.has_no_room = True
    leave(stage)
    getattr(stage.steps, asks)()
    assert stage.lost_groups == [TP.group]
    assert stage.engine.communicators.is_aborted(TP.group.ranks, TP.formation), "they wait in it"
    assert (stage.steps.has_deferred_step, stage.pushed) == (False, [])


@pytest.mark.parametrize("leads", [True, False])
def test_while_its_group_is_joined_it_fails_as_any_step_does(leads: bool) -> None:
    stage = held(leads)
    stage.abort(closes=False)
    with pytest.raises(PeerLostError):
        stage.steps.run_deferred()
    assert stage.lost_groups == []
    assert not stage.steps.has_inflight


@pytest.mark.parametrize("leads", [True, False])
def test_one_of_a_formation_that_is_dropped_is_never_computed(leads: bool) -> None:
    stage = held(leads)
    stage.steps.drop(TP.formation)
    assert (stage.steps.has_deferred_step, stage.steps.has_inflight) == (False, False)
    stage.steps.run_deferred()
    stage.steps.finish_inflight()
    assert (stage.tp.computed, stage.pushed) == (0, [])


def test_one_that_trails_is_computed_though_another_formation_is_dropped() -> None:
    stage = held(leads=True)
    leave(stage)
    stage.selected = stage.dp  # It is joined, but its width is selected after that step.
    stage.steps.drop(DP.formation)
    assert (stage.tp.computed, stage.pushed) == (1, [(4, ["tp task"])])


def test_it_is_over_even_if_it_fails() -> None:
    def compute() -> None:
        raise PeerLostError(3)

    step = DeferredStep(compute, DP, HOST)
    assert not step.query()
    with pytest.raises(PeerLostError):
        step.get_output()
    assert step.query()

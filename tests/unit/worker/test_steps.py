"""Steps under way when a group is left: whose tokens they are, and when they are taken."""

import time
from typing import Any

import msgspec
import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.terms import TaskId
from tests.harness.worker.stepping_rank import DP, TP, Stage, scheduler_of, task_of


def test_the_last_step_of_a_group_trails_until_its_tokens_are_there() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    assert stage.steps.has_detached_step
    stage.steps.finish_detached_if_ready()
    assert stage.pushed == [], "nobody waits for it"
    stage.engine.finish_steps()
    stage.steps.finish_detached_if_ready()
    assert stage.pushed == [(3, ["dp task"])], "in the epoch that it was launched in"
    assert not stage.steps.has_inflight
    assert stage.steps.take_detached_end_ns() == stage.steps.ended_ns
    assert stage.steps.take_detached_end_ns() is None, "a call takes it"
    assert stage.freed_groups == []


def test_the_first_new_step_is_launched_behind_the_last_old_one() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.select(TP)
    stage.step(TP, 4)
    assert (task_of(stage.dp).tokens != [], task_of(stage.tp).tokens) == (True, [])
    assert stage.pushed == [(3, ["dp task"])]
    assert stage.steps.take_detached_end_ns() is not None
    stage.steps.finish_inflight()
    assert stage.pushed[1:] == [(4, ["tp task"])]
    assert stage.steps.take_detached_end_ns() is None


@pytest.mark.parametrize("may_be_void", [False, True])
def test_no_step_is_planned_beside_one_whose_loads_may_be_void(
    monkeypatch: pytest.MonkeyPatch, may_be_void: bool
) -> None:
    stage = Stage()
    scheduler = scheduler_of(stage.dp)
    monkeypatch.setattr(type(scheduler), "may_be_void", property(lambda _: may_be_void))
    stage.step(DP, 3)
    planned: list[int] = []
    plan_step = stage.dp.plan_step

    def note(*args: Any) -> Any:
        planned.append(len(stage.pushed))
        return plan_step(*args)

    monkeypatch.setattr(stage.dp, "plan_step", note)
    stage.step(DP, 3)
    assert planned == [1 if may_be_void else 0], "tokens of the step before have been pushed"


@pytest.mark.parametrize("may_be_void", [False, True])
def test_a_step_whose_loads_may_be_void_ends_before_its_group_is_left(
    monkeypatch: pytest.MonkeyPatch, may_be_void: bool
) -> None:
    """What is published of its tasks would count what they have loaded."""
    stage = Stage()
    scheduler = scheduler_of(stage.dp)
    assert not stage.steps.must_end
    stage.step(DP, 3)
    monkeypatch.setattr(type(scheduler), "may_be_void", property(lambda _: may_be_void))
    assert stage.steps.must_end is may_be_void
    stage.steps.finish_inflight()
    assert not stage.steps.must_end


def test_what_a_task_held_that_ends_behind_its_group_is_free() -> None:
    stage = Stage(tokens=1)
    stage.leave_in_mid_step()
    stage.steps.finish_inflight()
    assert stage.freed_groups == [DP.group]
    assert [each.task for each in stage.ended] == [TaskId("dp task")]


def test_blocks_that_were_free_behind_the_step_are_given_up_then() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    scheduler_of(stage.dp).take_back(["dp task"])
    stage.steps.finish_inflight()
    assert (stage.freed_groups, stage.ended) == ([DP.group], [])


def test_a_group_that_is_joined_again_within_one_step_goes_on() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.select(DP)
    assert [stage.steps.has_inflight, stage.steps.has_detached_step] == [True, False]
    stage.step(DP, 5)
    assert stage.pushed == [(3, ["dp task"])]
    assert stage.freed_groups == []


def test_a_group_counts_as_left_behind_until_the_device_is_done_with_it() -> None:
    stage = Stage()
    seen = [stage.steps.draining_groups]
    stage.leave_in_mid_step()
    seen.append(stage.steps.draining_groups)
    stage.engine.finish_steps()
    seen.append(stage.steps.draining_groups)
    assert seen == [(), ((DP, {Rank(0): 1}),), ()]


def test_groups_that_were_left_count_until_the_device_is_done_with_each() -> None:
    """A step that lacks a member holds up those of the groups that the rank joined since."""
    stage = Stage()
    stage.leave_in_mid_step()
    first = stage.steps.draining_groups
    later = msgspec.structs.replace(DP, formation=DP.formation + 1)
    stage.steps.on_leave((later, {Rank(0): 1}))
    assert stage.steps.draining_groups == (*first, (later, {Rank(0): 1}))
    stage.engine.finish_steps()
    assert stage.steps.draining_groups == ()


def test_a_follower_knows_when_a_step_is_over_only_if_it_is_at_once() -> None:
    stage = Stage()
    stage.follow(DP)
    assert stage.steps.ended_ns == 0
    stage.engine.finish_steps()
    stage.engine.is_synchronous = True
    stage.follow(DP)
    assert stage.steps.ended_ns >= stage.steps.started_ns > 0
    stage.engine.is_synchronous = False
    mode: Any = stage.dp
    mode.execute = lambda _plan: None
    stage.follow(DP)
    assert stage.steps.ended_ns == 0, "a follower on CUDA may get nothing, and has to wait"


def test_a_group_without_work_takes_the_tokens_that_are_left() -> None:
    stage = Stage()
    stage.step(DP, 3)
    scheduler: Any = scheduler_of(stage.dp)
    scheduler.has_requests = lambda: False
    stage.step(DP, 3)
    assert stage.pushed == [(3, ["dp task"])]
    assert (stage.dp.computed, len(stage.sent)) == (1, 1)


def test_tokens_of_an_aborted_formation_go_nowhere() -> None:
    stage = Stage()
    stage.select(TP)
    stage.step(TP, 4)
    stage.abort(closes=True)
    with pytest.raises(PeerLostError) as raised:
        stage.step(TP, 4)
    assert raised.value.formation == TP.formation
    stage.engine.finish_steps()
    stage.steps.drop(TP.formation)
    assert not stage.steps.has_inflight
    stage.steps.finish_inflight()
    assert (stage.pushed, stage.freed_groups) == ([], [])
    assert task_of(stage.tp).tokens == []


def test_it_is_asked_behind_the_tokens_whether_they_count() -> None:
    """A step that waits for a peer comes to its end because the formation was aborted."""
    stage = Stage()
    stage.select(TP)
    stage.step(TP, 4)
    launched: Any = stage.engine.launched[0]
    take = launched.get_output

    def taken_late() -> dict[str, int]:
        stage.abort(closes=True)
        given: dict[str, int] = take()
        return given

    launched.get_output = taken_late
    with pytest.raises(PeerLostError):
        stage.steps.finish_inflight()
    assert (launched.query(), stage.pushed) == (True, [])
    assert not stage.steps.has_inflight, "it is over even so"


def test_a_follower_launches_no_step_of_an_aborted_formation() -> None:
    stage = Stage()
    stage.select(TP)
    stage.abort(closes=False)
    with pytest.raises(PeerLostError):
        stage.follow(TP)
    assert not stage.engine.launched


def test_a_step_is_dropped_when_the_device_is_done_with_it() -> None:
    stage, looks = Stage(), list[bool]()
    stage.select(TP)
    stage.step(TP, 4)

    def is_done() -> bool:
        looks.append(stage.steps.has_inflight)
        if len(looks) == 6:
            stage.engine.finish_steps()
        return len(looks) > 3

    engine: Any = stage.engine
    engine.done = lambda: is_done
    stage.steps.drop(TP.formation)
    assert len(looks) == 6, "its kernels first, then the copy of its tokens"
    assert all(looks)
    assert not stage.steps.has_inflight
    assert (stage.pushed, task_of(stage.tp).tokens) == ([], [])
    stage.steps.drop(TP.formation)
    assert len(looks) == 7, "with none under way, what a follower has launched"


def test_a_step_that_trails_is_none_of_the_formation_that_is_dropped() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.select(TP)
    stage.abort(closes=True)
    stage.steps.drop(TP.formation)
    assert stage.pushed == [(3, ["dp task"])]
    assert not stage.steps.has_inflight


@pytest.mark.parametrize("closes", [False, True])
def test_a_step_that_trails_counts_unless_its_members_were_let_out(closes: bool) -> None:
    stage = Stage()
    stage.select(TP)
    stage.step(TP, 4)
    stage.select(DP)
    stage.abort(closes=closes)
    stage.engine.finish_steps()
    if closes:
        with pytest.raises(PeerLostError):
            stage.steps.finish_detached_if_ready()
        assert stage.pushed == []
    else:
        stage.steps.finish_detached_if_ready()
        assert stage.pushed == [(4, ["tp task"])], "it had ended before"


MS = 1_000_000


def test_it_tells_when_its_last_step_will_end() -> None:
    stage = Stage()
    begun = time.monotonic_ns()
    stage.step(DP, 3)
    (first,) = stage.expected
    assert 500 * MS <= first - begun < 5_000 * MS, "as long as at start-up"
    stage.log.usual = 5.0
    stage.step(DP, 3)
    _, behind, known = stage.expected
    assert behind == first + 5_000 * MS, "behind the one under way"
    assert known == stage.steps.ended_ns + 5_000 * MS, "which has ended by now"
    assert (stage.steps.ends_ns, stage.steps.decode_ns) == (known, 5_000 * MS)


class DeviceTimes:
    """Of a device that computes a step in 4 ms, and then waits 3 ms for the host."""

    def __init__(self, number: int) -> None:
        self.began_ms, self.ended_ms = 7 * number, 7 * number + 4

    def seconds(self, before: "DeviceTimes | None") -> float:
        return (self.ended_ms - (self.began_ms if before is None else before.ended_ms)) / 1000


def test_a_step_costs_what_the_device_waits_for_the_host_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    launched: list[Any] = []
    execute = stage.dp.execute

    def timed(plan: Any) -> Any:
        launched.append(execute(plan))
        launched[-1].device_times = DeviceTimes(len(launched))
        return launched[-1]

    monkeypatch.setattr(stage.dp, "execute", timed)
    for _ in range(3):
        stage.step(DP, 3)
    stage.steps.finish_inflight()
    assert stage.log.device_s == [0.004, 0.007, 0.007], "the first followed none"
    stage.step(DP, 3)
    stage.steps.finish_inflight()
    assert stage.log.device_s[3:] == [0.004], "the device had nothing to do before it"


def test_a_device_may_tell_no_times() -> None:
    stage = Stage()
    stage.step(DP, 3)
    stage.steps.finish_inflight()
    assert stage.log.device_s == [None]


def test_neither_prompts_nor_empty_steps_say_how_long_a_decode_takes() -> None:
    stage = Stage(tokens=2)
    for usual_s, decode_ms in ((1.0, 0), (5.0, 5_000), (0.001, 5_000)):
        stage.log.usual = usual_s
        begun = time.monotonic_ns()
        stage.step(DP, 3)
        assert stage.steps.decode_ns == decode_ms * MS
    assert stage.steps.ends_ns - begun < 1_000 * MS, "the step before was taken, this is none"


def test_a_step_behind_none_begins_now_whatever_was_expected() -> None:
    stage = Stage()
    stage.log.usual = 5.0
    stage.step(DP, 3)
    stage.steps.finish_inflight()
    stage.log.usual = 1.0
    begun = time.monotonic_ns()
    stage.step(DP, 3)
    assert 1_000 * MS <= stage.expected[-1] - begun < 3_000 * MS


def test_a_step_that_computes_nothing_asks_which_tasks_cannot_go_on() -> None:
    stage = Stage(tokens=1)
    stage.step(DP, 3)
    stage.engine.finish_steps()
    stage.steps.finish_inflight()
    assert stage.idle_groups == []
    stage.step(DP, 3)  # It only lists the task that has ended.
    assert stage.idle_groups == [DP.group]

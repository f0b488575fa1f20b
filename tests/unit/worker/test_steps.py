"""Steps under way when a group is left: whose tokens they are, and when they are taken."""

import time
from typing import Any, cast

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.terms import TaskId
from tests.harness.worker.stepping_rank import DP, TP, Stage, follow


def test_the_last_step_of_a_group_trails_until_its_tokens_are_there() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    assert stage.steps.has_detached_step
    stage.steps.finish_detached_if_ready()
    assert stage.pushed == [], "nobody waits for it"
    stage.dp.results[0].is_there = True
    stage.steps.finish_detached_if_ready()
    assert stage.pushed == [(3, ["dp task"])], "in the epoch that it was launched in"
    assert not stage.steps.has_inflight
    assert stage.steps.take_detached_end_ns() == stage.steps.ended_ns
    assert stage.steps.take_detached_end_ns() is None, "a call takes it"
    assert stage.freed_groups == []


def test_the_first_new_step_is_launched_behind_the_last_old_one() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.selected = stage.tp
    stage.step(stage.tp, TP, 4)
    assert stage.tp.scheduler.events == ["plan"]
    assert stage.dp.scheduler.events == ["plan", "finish"], "its tokens are taken by its scheduler"
    assert stage.pushed == [(3, ["dp task"])]
    assert stage.steps.take_detached_end_ns() is not None
    stage.steps.finish_inflight()
    assert stage.pushed[1:] == [(4, ["tp task"])]
    assert stage.steps.take_detached_end_ns() is None


def test_what_a_task_held_that_ends_behind_its_group_is_free() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.dp.scheduler.ends = True
    stage.steps.finish_inflight()
    assert stage.freed_groups == [DP.group]
    assert [each.task for each in stage.ended] == [TaskId("dp task")]


def test_blocks_that_were_free_behind_the_step_are_given_up_then() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.dp.scheduler.frees_after_step = True
    stage.steps.finish_inflight()
    assert stage.freed_groups == [DP.group]


def test_a_group_that_is_joined_again_within_one_step_goes_on() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.selected = stage.dp
    assert [stage.steps.has_inflight, stage.steps.has_detached_step] == [True, False]
    stage.step(stage.dp, DP, 5)
    assert stage.pushed == [(3, ["dp task"])]
    assert stage.freed_groups == []


def test_a_group_counts_as_left_behind_until_the_device_is_done_with_it() -> None:
    stage = Stage()
    seen = [stage.steps.draining_group]
    stage.leave()
    for is_done in (False, True, False):
        stage.device_done = is_done
        seen.append(stage.steps.draining_group)
    assert seen == [None, (DP, {Rank(0): 1}), None, None], "once is enough"


def test_a_follower_knows_when_a_step_is_over_only_if_it_is_at_once() -> None:
    stage = Stage()
    follow(stage, stage.dp, DP)
    assert stage.steps.ended_ns == 0
    stage.dp.execute = lambda _plan: cast(Any, "output")  # type: ignore[method-assign]
    follow(stage, stage.dp, DP)
    assert stage.steps.ended_ns >= stage.steps.started_ns > 0
    stage.engine.is_synchronous = False
    stage.dp.execute = lambda _plan: cast(Any, None)  # type: ignore[method-assign]
    follow(stage, stage.dp, DP)
    assert stage.steps.ended_ns == 0, "a follower on CUDA may get nothing, and has to wait"


def test_a_group_without_work_takes_the_tokens_that_are_left() -> None:
    stage = Stage()
    stage.step(stage.dp, DP, 3)
    stage.dp.scheduler.busy = False
    stage.step(stage.dp, DP, 3)
    assert stage.pushed == [(3, ["dp task"])]
    assert len(stage.dp.results) == 1


def lose(stage: Stage, *, lets_out: bool) -> None:
    stage.aborted.add((TP.group.ranks, TP.formation))
    if lets_out:
        stage.closed = (TP.group.ranks,)


def test_tokens_of_an_aborted_formation_go_nowhere() -> None:
    stage = Stage()
    stage.selected = stage.tp
    stage.step(stage.tp, TP, 4)
    lose(stage, lets_out=True)
    with pytest.raises(PeerLostError) as raised:
        stage.step(stage.tp, TP, 4)
    assert raised.value.formation == TP.formation
    stage.tp.results[1].is_there = stage.device_done = True
    stage.steps.drop(TP.formation)
    assert not stage.steps.has_inflight
    stage.steps.finish_inflight()
    assert (stage.pushed, stage.freed_groups) == ([], [])
    assert stage.tp.scheduler.events == ["plan", "plan"]


def test_it_is_asked_behind_the_tokens_whether_they_count() -> None:
    """A step that waits for a peer comes to its end because the formation was aborted."""
    stage = Stage()
    stage.selected = stage.tp
    stage.step(stage.tp, TP, 4)
    result = stage.tp.results[0]
    take = result.get_output

    def taken_late() -> str:
        lose(stage, lets_out=True)
        return take()

    result.get_output = taken_late  # type: ignore[method-assign]
    with pytest.raises(PeerLostError):
        stage.steps.finish_inflight()
    assert (result.taken, stage.pushed) == (1, [])
    assert not stage.steps.has_inflight, "it is over even so"


def test_a_follower_launches_no_step_of_an_aborted_formation() -> None:
    stage = Stage()
    lose(stage, lets_out=False)
    with pytest.raises(PeerLostError):
        follow(stage, stage.tp, TP)
    assert not stage.tp.results


def test_a_step_is_dropped_when_the_device_is_done_with_it() -> None:
    stage, looks = Stage(), []
    stage.selected = stage.tp
    stage.step(stage.tp, TP, 4)

    def is_done() -> bool:
        looks.append(stage.steps.has_inflight)
        stage.tp.results[0].is_there = len(looks) > 5
        return len(looks) > 3

    stage.engine.done = lambda: is_done
    stage.steps.drop(TP.formation)
    assert len(looks) == 6, "its kernels first, then the copy of its tokens"
    assert all(looks)
    assert not stage.steps.has_inflight
    assert stage.tp.results[0].taken == 0
    stage.steps.drop(TP.formation)
    assert len(looks) == 7, "with none under way, what a follower has launched"


def test_a_step_that_trails_is_none_of_the_formation_that_is_dropped() -> None:
    stage = Stage()
    stage.leave_in_mid_step()
    stage.selected = stage.tp
    stage.device_done = True
    lose(stage, lets_out=True)
    stage.steps.drop(TP.formation)
    assert stage.pushed == [(3, ["dp task"])]
    assert not stage.steps.has_inflight


@pytest.mark.parametrize("lets_out", [False, True])
def test_a_step_that_trails_counts_unless_its_members_were_let_out(lets_out: bool) -> None:
    stage = Stage()
    stage.selected = stage.tp
    stage.step(stage.tp, TP, 4)
    stage.selected = stage.dp
    lose(stage, lets_out=lets_out)
    stage.tp.results[0].is_there = True
    if lets_out:
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
    stage.step(stage.dp, DP, 3)
    (first,) = stage.expected
    assert 2 * MS <= first - begun < 1_000 * MS, "as long as at start-up"
    stage.usual_s = 5.0
    stage.step(stage.dp, DP, 3)
    _, behind, known = stage.expected
    assert behind == first + 5_000 * MS, "behind the one under way"
    assert known == stage.steps.ended_ns + 5_000 * MS, "which has ended by now"
    assert (stage.steps.ends_ns, stage.steps.decode_ns) == (known, 5_000 * MS)


def test_an_empty_step_says_nothing_of_how_long_a_decode_takes() -> None:
    stage = Stage()
    stage.usual_s = 5.0
    stage.step(stage.dp, DP, 3)
    stage.dp.scheduler.is_empty = True
    stage.usual_s = 0.001
    begun = time.monotonic_ns()
    stage.step(stage.dp, DP, 3)
    assert stage.steps.decode_ns == 5_000 * MS
    assert stage.steps.ends_ns - begun < 1_000 * MS, "the step before was taken, this is none"


def test_a_step_behind_none_begins_now_whatever_was_expected() -> None:
    stage = Stage()
    stage.usual_s = 5.0
    stage.step(stage.dp, DP, 3)
    stage.steps.finish_inflight()
    stage.usual_s = 1.0
    begun = time.monotonic_ns()
    stage.step(stage.dp, DP, 3)
    assert 1_000 * MS <= stage.expected[-1] - begun < 3_000 * MS

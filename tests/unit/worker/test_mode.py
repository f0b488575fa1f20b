"""How a leader chooses the mode of a step, and how its followers hear of it."""

import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from comm_pool.layout import Group, Mode, Rank, StepMode
from comm_pool.mixed import Mixed
from worker.engine.config import ModeKey
from worker.engine.mode import PreparedMode
from worker.engine.scheduling.step_plan import StepPlan
from worker.rank.step_times import StepCurve, StepTimes

TP = StepCurve(((1, 1_000), (100, 3_000)))
SP = StepCurve(((1, 2_000), (100, 2_100)))
MIXED = StepCurve(((1, 1_500), (100, 2_300)))
SHAPE = Mixed(2, 2)
CURVES: dict[StepMode, StepCurve] = {Mode.TP: TP, Mode.SP: SP, SHAPE: MIXED}


def group(mode: Mode, tp: int = 1) -> Group:
    width = 1 if mode is Mode.DP else 4
    return Group(tuple(map(Rank, range(width))), mode, tp)


def prepared(curves: dict[StepMode, StepCurve]) -> PreparedMode:
    absent: Any = None
    mode = PreparedMode(
        ModeKey(Mode.TP, 4), absent, absent, absent, absent, absent, StepTimes(4, {})
    )
    mode.calibrate(StepTimes(4, curves))
    return mode


def test_a_shift_group_goes_by_the_measured_threshold() -> None:
    mode, times = prepared(CURVES), StepTimes(4, CURVES)
    start = times.sp_from_tokens
    assert start is not None
    assert 50 < start < 60
    assert mode.mode_of_step(group(Mode.SHIFT), start - 1) is Mode.TP
    assert mode.mode_of_step(group(Mode.SHIFT), start) is Mode.SP
    start_mixed = times.from_tokens(SHAPE)
    assert start_mixed is not None
    assert start_mixed < start
    assert mode.mode_of_step(group(Mode.SHIFT, 2), start_mixed - 1) is Mode.TP
    assert mode.mode_of_step(group(Mode.SHIFT, 2), start) == SHAPE


@pytest.mark.parametrize("pinned", [Mode.DP, Mode.TP, Mode.SP])
def test_other_groups_are_pinned(pinned: Mode) -> None:
    mode = prepared(CURVES)
    assert {mode.mode_of_step(group(pinned), tokens) for tokens in (0, 1, 10_000)} == {pinned}
    assert {mode.mode_of_step(group(Mode.SP, 2), tokens) for tokens in (0, 1)} == {SHAPE}


def test_without_sp_a_shift_group_computes_in_tp() -> None:
    mode = prepared({Mode.TP: TP})
    assert mode.mode_of_step(group(Mode.SHIFT), 10_000) is Mode.TP
    assert mode.mode_of_step(group(Mode.SHIFT, 2), 10_000) is Mode.TP


@pytest.mark.parametrize("mode", [Mode.TP, Mode.SP, SHAPE])
def test_followers_read_the_mode_in_the_step_message(mode: StepMode) -> None:
    plan = StepPlan(SchedulerOutput.make_empty(), None, mode=mode)
    assert pickle.loads(pickle.dumps(plan)).mode == mode

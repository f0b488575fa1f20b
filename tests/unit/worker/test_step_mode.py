"""How a leader chooses the mode of a step, and how its followers hear of it."""

import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from comm_pool.layout import Mode
from worker.step_times import StepCurve, StepTimes
from worker.vllm_config import ModeKey
from worker.vllm_rank import PreparedMode
from worker.vllm_step_plan import StepPlan

TP = StepCurve(((1, 1_000), (100, 3_000)))
SP = StepCurve(((1, 2_000), (100, 2_100)))


def prepared(curves: dict[Mode, StepCurve]) -> PreparedMode:
    absent: Any = None
    mode = PreparedMode(
        ModeKey(Mode.TP, 4), absent, absent, absent, absent, absent, StepTimes(4, {})
    )
    mode.calibrate(StepTimes(4, curves))
    return mode


def test_a_shift_group_goes_by_the_measured_threshold() -> None:
    mode = prepared({Mode.TP: TP, Mode.SP: SP})
    start = StepTimes(4, {Mode.TP: TP, Mode.SP: SP}).sp_from_tokens
    assert start is not None
    assert 50 < start < 60
    assert mode.mode_of_step(Mode.SHIFT, start - 1) is Mode.TP
    assert mode.mode_of_step(Mode.SHIFT, start) is Mode.SP


@pytest.mark.parametrize("pinned", [Mode.DP, Mode.TP, Mode.SP])
def test_other_groups_are_pinned(pinned: Mode) -> None:
    mode = prepared({Mode.TP: TP, Mode.SP: SP})
    assert {mode.mode_of_step(pinned, tokens) for tokens in (0, 1, 10_000)} == {pinned}


def test_without_sp_a_shift_group_computes_in_tp() -> None:
    assert prepared({Mode.TP: TP}).mode_of_step(Mode.SHIFT, 10_000) is Mode.TP


@pytest.mark.parametrize("mode", [Mode.TP, Mode.SP])
def test_followers_read_the_mode_in_the_step_message(mode: Mode) -> None:
    plan = StepPlan(SchedulerOutput.make_empty(), None, mode=mode)
    assert pickle.loads(pickle.dumps(plan)).mode is mode

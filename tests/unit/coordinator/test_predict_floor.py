"""What the policy expects of groups whose steps take at least as long as their loans."""

import math
from dataclasses import replace

import pytest

from coordinator.model.cost_model import GroupCost
from coordinator.model.policy_settings import TierGoal
from coordinator.model.step_line import StepLine
from coordinator.policy.predict import Demand, TierForecast, _Load, forecast

LINE = StepLine(0.02, 1e-4, 0.0)
PLAIN = GroupCost(LINE, LINE, 100_000)
LENT = replace(PLAIN, floor_s=0.08, prefill_floor_s=0.08)
NO_GOAL = TierGoal(None, None)


def expected(cost: GroupCost, **demand: object) -> TierForecast:
    (found,) = forecast(cost, 1, [_demand(demand)], 8.0)
    return found


def _demand(fields: dict[str, object]) -> Demand:
    given = {"rate": 0.0, "prompts": (500,), "output": 100.0, **fields}
    return Demand(1, NO_GOAL, **given)  # type: ignore[arg-type]


def test_decodes_wait_for_loans() -> None:
    running = {"running": 10.0, "context": 5_000.0, "to_come": 5_000.0}
    assert expected(PLAIN, **running).tpot_s == pytest.approx(0.021)
    assert expected(LENT, **running).tpot_s == pytest.approx(0.08)


def test_prompts_hide_behind_loans_as_far_as_they_come_evenly() -> None:
    """One prompt of 50 ms a step, on average: every third step has none and waits 60 ms."""
    rate = 1 / 0.1
    found = expected(LENT, rate=rate, prompts=(500,), output=1.0)
    count = rate * found.tpot_s
    idle_s = 0.08 - 0.02 - 1e-4 * count
    waits_s = math.exp(-count) * (idle_s + count * max(0.0, idle_s - 0.05))
    assert found.tpot_s == pytest.approx(0.02 + (0.05 + 1e-4) * count + waits_s, rel=0.02)
    small = expected(LENT, rate=rate * 50, prompts=(10,), output=1.0)
    assert small.tpot_s == pytest.approx(0.08, rel=0.05), "small prompts come evenly"


def test_a_group_that_borrows_is_full_sooner() -> None:
    few = replace(LENT, tasks_max=16)
    use = [expected(each, rate=1.0).use for each in (replace(PLAIN, tasks_max=16), few)]
    assert use[0] == pytest.approx(0.05 + 100 * (0.02 / 16 + 1e-4), rel=1e-3)
    assert use[0] * 1.5 < use[1] < 0.05 + 100 * 0.08 / 16


def test_above_the_floor_nothing_changes() -> None:
    low = replace(PLAIN, floor_s=0.01, prefill_floor_s=0.01)
    demand = {"rate": 3.0, "running": 20.0, "context": 10_000.0, "to_come": 1_000.0}
    plain, lent = expected(PLAIN, **demand), expected(low, **demand)
    assert lent.ttft_s == pytest.approx(plain.ttft_s)
    assert lent.tpot_s == pytest.approx(plain.tpot_s)
    assert lent.use == pytest.approx(plain.use)


def test_the_first_token_of_a_short_prompt_comes_after_the_loans() -> None:
    assert expected(PLAIN, rate=0.01, prompts=(10,)).ttft_s == pytest.approx(0.031, rel=0.1)
    assert expected(LENT, rate=0.01, prompts=(10,)).ttft_s == pytest.approx(0.12, rel=0.1)


def test_tasks_that_run_on_need_the_time_of_their_loans() -> None:
    """800 tokens of 8 tasks are 100 steps, while new requests wait."""
    running: dict[str, object] = {"running": 8.0, "context": 4_000.0, "to_come": 800.0}
    running["rate"] = 1e-6
    plain, lent = (expected(replace(each, tasks_max=8), **running) for each in (PLAIN, LENT))
    assert plain.tpot_s == pytest.approx(0.0208, rel=0.05)
    assert lent.tpot_s == pytest.approx(0.08, rel=0.01)
    load = _Load(replace(LENT, tasks_max=8), [_demand(running)], 8.0)
    assert load._backlog_s(_demand(running)) == pytest.approx(8.0, rel=0.01)
    still = {**running, "rate": 0.0}
    load = _Load(replace(LENT, tasks_max=8), [_demand(still)], 8.0)
    assert load._backlog_s(_demand(still)) == pytest.approx(8.0)

"""What was measured on GPUs is what the simulated cell is asked about, and it stays as near."""

import json
from typing import Any

import pytest

from tests.bench.simulated_gpu import compare, plan_of, table
from tests.harness.cells.servers import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks"
POLICY = BENCHMARKS / "2026-11-22-gpu-policy-llama-3-70b-fp8-2.json"
STEPS = BENCHMARKS / "2026-11-22-gpu-llama-3-70b-fp8-2-all-modes.json"


@pytest.fixture(scope="module")
def policy() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(POLICY.read_text())["servers"]
    return found


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STEPS.read_text())
    return found


def test_the_simulated_cell_gets_the_requests_that_were_sent(policy: dict[str, Any]) -> None:
    report = policy["static tp2"]["bursty"]
    plan = plan_of(report)
    tokens = report["total"]["tokens"]
    assert sum(each.input_tokens for each in plan) == tokens["prompt"]
    assert sum(each.output_tokens for each in plan) == tokens["output"]


def test_another_plan_than_the_report_s_is_refused(policy: dict[str, Any]) -> None:
    report = policy["static tp2"]["bursty"]
    with pytest.raises(SystemExit, match="other requests"):
        plan_of({**report, "plan": {**report["plan"], "digest": "0" * 16}})


@pytest.mark.parametrize(
    ("server", "good_error", "times_error"),
    [("static tp2", 0.05, 0.25), ("static dp2", 0.25, 0.5)],
)
def test_the_simulated_cell_is_as_near_to_the_gpus_as_is_stated(
    server: str,
    good_error: float,
    times_error: float,
    policy: dict[str, Any],
    steps: dict[str, Any],
) -> None:
    rows = compare(server, policy[server]["bursty"], steps)
    whole = rows[-1]
    assert whole.phase == "all"
    assert whole.simulated.requests == whole.real.requests
    assert abs(whole.simulated.good - whole.real.good) < good_error
    for name, real in whole.real.times_ms.items():
        assert abs(whole.simulated.times_ms[name] - real) < times_error * real, name
    assert len(table(rows)) == len(rows) + 2

"""Verdicts of the policy's benchmark over HTTP."""

import json
from typing import Any

import pytest

from tests.bench.gpu_policy import servers
from tests.bench.gpu_policy_report import bursty_verdicts, latency_in_goals, section_of
from tests.harness.cells.servers import ROOT

LANDED = ROOT / "docs" / "benchmarks" / "2026-11-22-gpu-policy-llama-3-70b-fp8-2.json"


def summary(mean: float, count: int = 10) -> dict[str, float]:
    return {"mean": mean, "count": count, "p50": mean, "p90": 2 * mean}


def test_latency_is_a_mean_over_requests_with_goals() -> None:
    goal = {"ttft_ms": 1_000, "tpot_ms": 50}
    report: dict[str, Any] = {
        "slos": {
            "interactive": goal,
            "standard": {"ttft_ms": 2_000, "tpot_ms": None},
            "batch": {"ttft_ms": None, "tpot_ms": None},
        },
        "tiers": {
            "interactive": {"ttft_ms": summary(500, 30), "tpot_ms": summary(10, 30)},
            "standard": {"ttft_ms": summary(2_000, 10), "tpot_ms": summary(10, 10)},
            "batch": {"ttft_ms": summary(9_000, 60), "tpot_ms": summary(10, 60)},
        },
    }
    assert latency_in_goals(report) == pytest.approx((30 * 0.35 + 10 * 1.0) / 40)
    assert latency_in_goals({**report, "tiers": {"batch": report["tiers"]["batch"]}}) is None


def test_each_static_server_has_a_twin_with_defaults() -> None:
    assert list(servers(2)) == [
        *("aileron", "static dp2", "static tp2", "static dp2, defaults", "static tp2, defaults")
    ]


def test_a_landed_run_is_judged_against_the_better_server() -> None:
    landed: dict[str, Any] = json.loads(LANDED.read_text())
    reports = {name: each["bursty"] for name, each in landed["servers"].items()}
    found = {each.target: each for each in bursty_verdicts(reports, 2)}
    phases = reports["aileron"]["phases"]
    assert len(found) == 2 * len(phases) + 3
    ours, statics = reports["aileron"], [reports["static dp2"], reports["static tp2"]]
    tpot = ours["phases"][0]["tpot_ms"]["p50"]
    best = min(each["phases"][0]["tpot_ms"]["p50"] for each in statics)
    verdict = found[f"TPOT p50 of {phases[0]['name']}: at most 1.05 x the best's"]
    assert float(verdict.measured) == pytest.approx(tpot / best, abs=0.001)

    rows = [each for each in section_of("bursty", reports, 2) if each.startswith("| phase ")]
    assert len(rows) == len(phases) * len(reports), "a phase's only tier has no own rows"

    ours["decisions"] = [
        {"choice": "tp2", "reason": "it is faster", "changes": True},
        {"choice": "tp2", "reason": "it is the best", "changes": False},
    ]
    assert "- tp2: it is faster." in section_of("bursty", reports, 2)
    assert "it is the best" not in "".join(section_of("bursty", reports, 2))

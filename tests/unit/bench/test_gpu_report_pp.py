"""Verdicts on pipeline groups, from made-up results."""

from typing import Any

import pytest

from tests.bench import gpu_report_pp
from tests.bench.gpu_report import document

PROMPTS, SATURATED = "32x4096+1", "96x3000+256"


def server(prompts: float, saturated: float, ttft: float = 3500.0) -> dict[str, Any]:
    return {
        "ttft": {"32768": {"median_ms": ttft}},
        "tpot": {"64": {"median_ms": 4.0, "streams": [32]}},
        "saturated": {PROMPTS: {"tokens_per_s": prompts}, SATURATED: {"tokens_per_s": saturated}},
    }


def results(
    pp: dict[str, float] | None = None, is_slow: bool = True, gap: dict[str, float] | None = None
) -> Any:
    ours = {"prompts": 9.5, "saturated": 1700.0} | (pp or {})
    servers = {
        "aileron pp2": server(**ours),
        "aileron tp2": server(5.0, 1000.0),
        "aileron dp2": server(10.0, 1200.0),
        "static tp2": server(5.0, 1000.0),
        "static pp2": server(9.0, 1600.0),
    }
    curves = {"pp2": [{"tokens": 1, "ms": 2.3}], "tp": [{"tokens": 1, "ms": 3.8}]}
    reshard = {
        "switches": 40, "streams": 200, "stopped": "", "phases": {}, "totals": {},
        "client_stall_worst_ms": gap, "gpu_memory_mib": {"before": [1], "after": [1]},
    }  # fmt: skip
    return {
        "shape": "llama-3-70b-fp8", "ranks": 2, "date": "2026-01-02", "command": "x",
        "commit": "abc", "hardware": "2 x GPU", "errors": {}, "servers": servers,
        "engine": {"disable_custom_all_reduce": True} if is_slow else {},
        "aileron": {
            "step_times": [{"width": 2, "curves": curves}],
            "switches": {"reshard": reshard},
        },
    }  # fmt: skip


def words(found: Any) -> list[str]:
    return [verdict.word for verdict in gpu_report_pp.verdicts(found)]


def test_all_targets_of_a_slow_link_can_be_met() -> None:
    assert words(results()) == ["met"] * 5


@pytest.mark.parametrize(
    ("pp", "missed"),
    [
        ({"prompts": 8.4}, {0, 1}),
        ({"prompts": 9.2}, {1}),
        ({"saturated": 1599.0}, {2, 3}),
        ({"saturated": 1679.0}, {3}),
        ({"ttft": 3601.0}, {4}),
    ],
)
def test_each_target_of_a_slow_link_can_be_missed(pp: dict[str, float], missed: set[int]) -> None:
    found = words(results(pp))
    assert {place for place, word in enumerate(found) if word == "**missed**"} == missed


def test_other_shapes_have_no_target_for_a_long_prompt() -> None:
    assert len(words(results() | {"shape": "llama-3-8b"})) == 4


@pytest.mark.parametrize(
    ("p50", "p99", "expected"),
    [
        (90.0, 150.0, ["met", "met"]),
        (91.0, 151.0, ["**missed**", "**missed**"]),
    ],
)
def test_a_fast_link_has_targets_for_switches(p50: float, p99: float, expected: list[str]) -> None:
    gap = {"count": 40, "p50": p50, "p99": p99, "max": p99}
    assert words(results(is_slow=False, gap=gap)) == expected


def test_what_was_not_measured_is_no_verdict() -> None:
    found = results()
    found["servers"] = {"aileron pp2": {}}
    assert words(found) == ["not measured"] * 5
    assert words(results(is_slow=False)) == ["not measured"] * 2


def test_a_stream_waits_for_as_many_steps_as_share_the_streams() -> None:
    text = "\n".join(document(results()))
    assert "| | aileron pp2 | aileron tp2 | aileron dp2 | static tp2 | static pp2 |" in text
    assert "| TPOT, 64 streams, ms | 8.00 | 4.00 | 4.00 | 4.00 | 8.00 |" in text
    assert "| tokens of a step | pp2, ms | tp2, ms |" in text

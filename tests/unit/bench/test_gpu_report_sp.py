"""Verdicts on sequence parallelism, from made-up results."""

from typing import Any

import pytest

from tests.bench import gpu_report_sp
from tests.bench.gpu_report import document


def server(ttft: float, tpot: float, rate: float) -> dict[str, Any]:
    return {
        "ttft": {"32768": {"median_ms": ttft}},
        "tpot": {"1": {"median_ms": tpot}},
        "saturated": {"all": {"tokens_per_s": rate}},
    }


def results(**changes: dict[str, Any]) -> dict[str, Any]:
    servers = {
        "aileron shift4": server(850.0, 10.2, 930.0),
        "aileron sp4": server(845.0, 25.0, 920.0),
        "aileron tp4": server(1010.0, 10.1, 600.0),
        "static tp4": server(1000.0, 10.0, 610.0),
        "static dp4": server(2000.0, 20.0, 1000.0),
    }
    # 160 all-reduces of 8,192 tokens, four steps: 1.25 ms x 160 x 4 / 1000 = 0.2 s at 312.5 us.
    reduce = {"tokens": 8192, "mib": 128, "us": 312.5, "per_step": 160}
    return {
        "shape": "llama-3-70b-fp8", "ranks": 4, "date": "2026-01-02", "command": "x",
        "commit": "abc", "hardware": "4 x GPU", "engine": {}, "aileron": {}, "errors": {},
        "servers": {**servers, **changes}, "all_reduce": reduce,
    }  # fmt: skip


def words(found: dict[str, Any]) -> list[str]:
    return [verdict.word for verdict in gpu_report_sp.verdicts(found)]


def test_all_targets_can_be_met() -> None:
    assert gpu_report_sp.communication_ms(results(), 32768) == pytest.approx(200.0)
    assert words(results()) == ["met"] * 5
    text = "\n".join(document(results()))
    assert "| TTFT of 32,768 tokens, ms | 850.00 | 845.00 | 1,010.00 |" in text
    assert "limit 850.0 ms" in text


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        (0, server(851.0, 10.2, 930.0)),
        (1, server(850.0, 10.2, 919.0)),
        (2, server(850.0, 10.2, 609.0)),
        (3, server(850.0, 10.31, 930.0)),
        (4, server(871.0, 10.2, 930.0)),
    ],
)
def test_each_target_can_be_missed(place: int, changed: dict[str, Any]) -> None:
    assert words(results(**{"aileron shift4": changed}))[place] == "**missed**"


def test_what_was_not_measured_is_no_verdict() -> None:
    found = results()
    del found["servers"]["static tp4"], found["all_reduce"]
    assert words(found) == ["not measured", "met", "not measured", "not measured", "met"]


def test_a_slow_link_has_targets_of_its_own() -> None:
    found = results(**{"aileron shift4": server(667.0, 10.0, 850.0)})
    found["engine"] = {"disable_custom_all_reduce": True}
    assert words(found) == ["**missed**", "**missed**"]
    found["servers"]["aileron shift4"] = server(660.0, 10.0, 860.0)
    assert words(found) == ["met", "met"]

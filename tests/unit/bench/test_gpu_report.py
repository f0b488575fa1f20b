"""Ratios, verdicts and tables, from made-up results."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu_numbers import sizes
from tests.bench.gpu_report import document, joined, verdicts, write_report
from tests.bench.gpu_shapes import Load
from tests.bench.gpu_verdict import Verdict


def server(factor: float, kv_bytes: float) -> dict[str, Any]:
    return {
        "start_s": 40.0,
        "kv_tokens": 500_000,
        "kv_bytes_per_gpu": kv_bytes,
        "ttft": {"512": {"median_ms": 20 * factor}, "4096": {"median_ms": 100 * factor}},
        "tpot": {"1": {"median_ms": 5 * factor}, "16": {"median_ms": 6 * factor}},
        "saturated": {"all": {"tokens_per_s": 1000 / factor}},
    }


def times(worst: float) -> dict[str, float]:
    return {"count": 100, "p50": worst / 2, "p99": worst, "max": worst}


RESULTS: dict[str, Any] = {
    "shape": "llama-3-8b",
    "ranks": 4,
    "date": "2026-01-02",
    "command": "python -m tests.bench.gpu",
    "commit": "abc",
    "hardware": "4 x GPU",
    "versions": {"vllm": "0.32.0"},
    "engine": {"max_num_seqs": 256},
    "servers": {
        "static dp4": server(1.0, 70e9),
        "static tp4": server(1.0, 70e9),
        "aileron dp4": server(1.01, 68e9),
        "aileron tp4": server(1.01, 66e9),
    },
    "aileron": {
        "memory": [{"weights": 16_000_000_000, "kv": 66_000_000_000}],
        "switches": {
            "pause": {
                "switches": 100,
                "streams": 200,
                "stopped": "",
                "phases": {"cut_over_ms": times(4.0), "swap_ms": times(0.2)},
                "totals": {"tasks_pause": 100},
                "gpu_memory_mib": {"before": [100, 100], "after": [100, 101]},
            }
        },
    },
    "errors": {},
    "seconds": {},
}


def judged(results: dict[str, Any]) -> dict[str, Verdict]:
    return {verdict.target: verdict for verdict in verdicts(results)}


def test_sizes_come_in_order() -> None:
    assert sizes(RESULTS, "ttft") == ["512", "4096"]


def test_targets_are_met_and_missed() -> None:
    words = {target: verdict.word for target, verdict in judged(RESULTS).items()}
    assert words == {
        "tp4 TTFT 512: at most 1.02 x static": "met",
        "tp4 TTFT 4096: at most 1.02 x static": "met",
        "tp4 TPOT 1: at most 1.02 x static": "met",
        "tp4 TPOT 16: at most 1.02 x static": "met",
        "dp4 saturated: at least 0.98 x static": "met",
        "cut-over p99: at most 5 ms": "met",
        "swap, slowest: below 0.1 ms": "**missed**",
        "dp4 KV: at most 2.5 GB per GPU below static": "met",
    }


def test_more_speed_or_memory_than_static_is_met() -> None:
    results = copy.deepcopy(RESULTS)
    results["servers"]["aileron tp4"] = server(0.9, 75e9)
    results["servers"]["aileron dp4"] = server(0.9, 75e9)
    missed = [target for target, verdict in judged(results).items() if not verdict.met]
    assert missed == ["swap, slowest: below 0.1 ms"]


def test_partial_results_are_reported() -> None:
    results = copy.deepcopy(RESULTS)
    del results["servers"]["static tp4"]
    results["aileron"] = {}
    results["errors"] = {"static-tp": "ServerError: no memory\nsomething long\nthe end"}
    found = judged(results)
    assert found["tp4 TPOT 1: at most 1.02 x static"].met is None
    assert found["dp4 saturated: at least 0.98 x static"].met is True
    text = "\n".join(document(results))
    assert "- static-tp: ServerError: no memory … the end" in text
    assert "not measured" in text


def test_document_shows_ratios_and_switches() -> None:
    text = "\n".join(document(RESULTS))
    assert "| tp4: TTFT of 4,096 tokens, ms | 101.0 | 100.0 | 1.010 |" in text
    assert "| dp4: TPOT, 16 streams per GPU, ms | 6.06 | 6.00 | 1.010 |" in text
    assert "| dp4: saturated, output tokens/s | 990 | 1,000 | 0.990 |" in text
    assert "| cut_over_ms | 100 | 2.000 | 4.000 | 4.000 |" in text
    assert "change over the switches: [0, 1]" in text


def test_memory_of_each_stage_is_shown_where_the_file_has_it() -> None:
    results = copy.deepcopy(RESULTS)
    older = {"rank": 0, "stage": "peers", "taken": 0, "used": 70_000_000_000}
    stages = [
        {"rank": rank, "stage": "weights", "taken": 73e9, "used": 74e9, **parts}
        for rank, parts in enumerate(
            ({"allocated": 72e9, "reserved": 72.5e9, "outside": 1.5e9}, {}), start=0
        )
    ]
    results["aileron"]["device_memory"] = [*stages, older]
    text = "\n".join(document(results))
    assert "| weights | 73.00 | 72.00 | 0.50 | 1.50 |" in text
    assert "| peers |" not in text
    results["aileron"]["device_memory"] = [older]
    assert "torch's free parts" not in "\n".join(document(results))


def test_partial_runs_join() -> None:
    ours, theirs = copy.deepcopy(RESULTS), copy.deepcopy(RESULTS)
    del ours["servers"]["static dp4"], ours["servers"]["static tp4"]
    theirs["aileron"] = {}
    whole = joined([ours, theirs])
    assert set(whole["servers"]) == set(RESULTS["servers"])
    assert whole["aileron"] == RESULTS["aileron"]
    theirs["ranks"] = 2
    with pytest.raises(ValueError, match="one shape"):
        joined([ours, theirs])


def test_report_writes_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "2026-01-02-gpu-llama-3-8b-4.json"
    file.write_text(json.dumps(RESULTS))
    text = write_report([file])
    assert file.with_suffix(".md").read_text() == text
    assert file.with_suffix(".svg").read_bytes().startswith(b"<?xml")


def test_named_loads_stand_in_place_of_the_usual_one() -> None:
    results = copy.deepcopy(RESULTS)
    for name, rate in (("aileron dp4", 900.0), ("static dp4", 1000.0)):
        results["servers"][name]["saturated"] = {"256x1024+128": {"tokens_per_s": rate}}
    for name in ("aileron tp4", "static tp4"):
        del results["servers"][name]["saturated"]
    text = "\n".join(document(results))
    assert "| dp4: 256x1024+128 per GPU, output tokens/s | 900 | 1,000 | 0.900 |" in text
    assert "saturated, output" not in text


def test_steps_timed_at_start_up_are_shown_with_loans_and_pace() -> None:
    results = copy.deepcopy(RESULTS)
    points = [{"tokens": 1, "ms": 69.0}, {"tokens": 1024, "ms": 93.4}]
    mixed = [{"tokens": 1, "ms": 12.0}]
    results["aileron"]["step_times"] = [
        {
            "width": 1,
            "curves": {"dp": points},
            "floor_ms": {"dp": 68.7},
            "pace_tokens": {"dp": 753},
            "mixed_from_tokens": {},
        },
        {"width": 4, "curves": {"sp2tp2": mixed}, "mixed_from_tokens": {"sp2tp2": None}},
    ]
    text = "\n".join(document(results))
    assert "| tokens of a step | dp1, ms | sp2tp2, ms |" in text
    assert "| 1 | 69.00 | 12.00 |" in text
    assert "| 1,024 | 93.40 | – |" in text
    assert "Loans of dp1: 68.7 ms; pace: 753 tokens." in text


def test_a_load_is_read_as_it_is_written() -> None:
    assert Load.parse("256x1024+128") == Load(256, 1024, 128)
    assert Load.parse("256x1024+128").name == "256x1024+128"
    with pytest.raises(ValueError, match="invalid literal"):
        Load.parse("256x1024")

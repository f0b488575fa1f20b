"""What a rank counts of its schedulers and loans."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from worker.engine.counters import EngineCounts, engine_totals


def test_totals_of_all_schedulers_and_of_loans() -> None:
    leads = SimpleNamespace(counted=lambda: EngineCounts(5, 3, 1))
    plain = dict(engine_totals([leads, None, leads]))
    assert plain == {
        "prefix_queries": 10,
        "prefix_hits": 6,
        "preemptions": 2,
        "borrowed_bytes": 0,
        "loan_wait_us": 0,
    }
    loans = SimpleNamespace(bytes_borrowed=7 << 30, wait_s=0.0015, whole_layers=0)
    totals = dict(engine_totals([], loans))
    assert (totals["borrowed_bytes"], totals["loan_wait_us"]) == (7 << 30, 1_500)

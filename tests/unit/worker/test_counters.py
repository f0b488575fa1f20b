"""What a rank counts of its schedulers and loans."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from comm_pool.layout import Mode
from worker.engine.counters import EngineCounts, LoanCounts, engine_totals
from worker.engine.weights.ring import LoanCopy, LoanRing


def test_totals_of_all_schedulers_and_of_loans() -> None:
    leads = SimpleNamespace(counted=lambda: EngineCounts(5, 3, 1, 70))
    plain = dict(engine_totals([leads, None, leads]))
    assert plain == {
        "prefix_queries": 10,
        "prefix_hits": 6,
        "preemptions": 2,
        "computed_tokens": 140,
        "borrowed_bytes": 0,
        "loan_wait_us": 0,
    }
    loans = SimpleNamespace(bytes_borrowed=7 << 30, wait_s=0.0015, whole_layers=0)
    totals = dict(engine_totals([], loans))
    assert (totals["borrowed_bytes"], totals["loan_wait_us"]) == (7 << 30, 1_500)


class TimedRing(LoanRing):
    """One loan of some bytes, whose copy takes some seconds."""

    def __init__(self, num_bytes: int, seconds: float) -> None:
        memory = torch.zeros(num_bytes, dtype=torch.int8)
        super().__init__([LoanCopy(memory, memory, None)])
        self.seconds = seconds
        self.aborted = 0

    def floor_s(self) -> float:
        return self.seconds

    def abort_step(self) -> None:
        self.aborted += 1


def test_a_step_alone_borrows_the_lm_head_too() -> None:
    """Ranks that share the tokens of a step compute logits as in tp."""
    layers, lm_head = TimedRing(700, 0.07), TimedRing(20, 0.002)
    loans = LoanCounts({Mode.DP: (layers, lm_head), Mode.SP: (layers,)})
    assert loans.modes == {Mode.DP, Mode.SP}
    met: list[int] = []
    assert loans.floors_s(lambda: met.append(1)) == {Mode.DP: pytest.approx(0.072), Mode.SP: 0.07}
    assert len(met) == 2, "all ranks measure each ring at once"
    for mode, total in ((Mode.DP, 720), (Mode.SP, 1420), (Mode.TP, 1420), (Mode.DP, 2140)):
        loans.count(mode)
        assert loans.bytes_borrowed == total
    layers.wait_s, lm_head.wait_s = 1.5, 0.25
    assert loans.wait_s == 1.75
    loans.abort_step()
    assert (layers.aborted, lm_head.aborted) == (1, 1)

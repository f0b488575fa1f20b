"""Loans through the ring of a GPU are compared with their lenders' checksums, fast.

Needs one NVIDIA GPU and vLLM's CUDA build; lender and borrower are one process.
"""

import time

import pytest

pytest.importorskip("vllm")

import torch

from worker.engine.weights.checksums import checksum, numbers_of
from worker.engine.weights.layers import ViewError
from worker.engine.weights.loan_proof import Promise, prove_loans
from worker.engine.weights.manifest import UnitSums
from worker.engine.weights.ring import LoanCopy, make_ring

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

DEVICE = torch.device("cuda", 0)
UNITS, SLOTS = 6, 2
LOAN_BYTES = 400 << 20
UNIT_LIMIT_S = 0.1


def test_loans_are_proved_and_a_changed_one_is_refused() -> None:
    draw = torch.Generator(DEVICE).manual_seed(1)
    held = [
        torch.randint(-128, 128, (LOAN_BYTES,), generator=draw, dtype=torch.int8, device=DEVICE)
        for _ in range(UNITS)
    ]
    small = [each[:256].clone() for each in held]
    sums = numbers_of(checksum(each) for each in (*held, *small))
    assert sums == numbers_of(checksum(each.cpu()) for each in (*held, *small))
    promises = [
        Promise(f"layer.{number}", 1, UnitSums((loan,), resident))
        for number, (loan, resident) in enumerate(zip(sums[:UNITS], sums[UNITS:], strict=True))
    ]
    slots = [torch.empty(LOAN_BYTES, dtype=torch.int8, device=DEVICE) for _ in range(SLOTS)]
    loans = [
        LoanCopy(each, slots[number % SLOTS], number - SLOTS if number >= SLOTS else None)
        for number, each in enumerate(held)
    ]
    ring = make_ring(loans, DEVICE)
    started = time.perf_counter()
    prove_loans(ring, small, promises)
    took_s = (time.perf_counter() - started) / UNITS
    print(f"{took_s * 1e3:.1f} ms for a loan of {LOAN_BYTES >> 20} MiB")
    assert took_s < UNIT_LIMIT_S
    held[UNITS - 1][LOAN_BYTES // 2] ^= 1
    with pytest.raises(ViewError, match=rf"layer\.{UNITS - 1} differs from what rank 1 lends"):
        prove_loans(ring, small, promises)

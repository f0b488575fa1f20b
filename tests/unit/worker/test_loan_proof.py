"""Checksums of weights, and loans that are compared with them at start-up."""

import pytest

pytest.importorskip("vllm")

import torch

from worker.engine.weights.checksums import ROW_WORDS, WORD_BYTES, checksum, numbers_of
from worker.engine.weights.layers import ViewError
from worker.engine.weights.loan_proof import Promise, prove_copies, prove_loans
from worker.engine.weights.manifest import UnitSums
from worker.engine.weights.ring import LoanCopy, LoanRing

ROW = ROW_WORDS * WORD_BYTES


def random_bytes(count: int, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (count,), generator=draw, dtype=torch.int8)


def sum_of(raw: torch.Tensor) -> int:
    return numbers_of([checksum(raw)])[0]


@pytest.mark.parametrize("size", [256, ROW, ROW + 256, 5 * ROW - 256])
def test_other_bytes_have_another_checksum(size: int) -> None:
    raw = random_bytes(size)
    whole = sum_of(raw)
    assert sum_of(raw.clone()) == whole
    for place in (0, size // 2, size - 1):
        for bit in (0, 7):
            changed = raw.clone()
            changed[place] ^= 1 << bit if bit < 7 else -128
            assert sum_of(changed) != whole, (place, bit)


@pytest.mark.parametrize(("first", "second"), [(0, 8), (0, ROW), (8, ROW + 16), (ROW, 3 * ROW)])
def test_words_in_another_place_have_another_checksum(first: int, second: int) -> None:
    raw = random_bytes(3 * ROW + 256)
    changed = raw.clone()
    changed[first : first + 8] = raw[second : second + 8]
    changed[second : second + 8] = raw[first : first + 8]
    assert sum_of(changed) != sum_of(raw)


def test_rows_that_are_exchanged_have_another_checksum() -> None:
    raw = random_bytes(4 * ROW)
    assert sum_of(raw.view(4, -1).flip(0).flatten()) != sum_of(raw)
    assert sum_of(raw.roll(256)) != sum_of(raw)


def test_no_bytes_have_a_checksum() -> None:
    assert sum_of(torch.empty(0, dtype=torch.int8)) == 0
    assert numbers_of([]) == []


def lent(number: int) -> tuple[torch.Tensor, torch.Tensor, Promise]:
    """What one lender holds of a unit: large tensors, small ones, and its promise."""
    large, small = random_bytes(2 * ROW, number), random_bytes(256, 100 + number)
    return (
        large,
        small,
        Promise(f"layer.{number}", number + 1, UnitSums((sum_of(large),), sum_of(small))),
    )


@pytest.mark.parametrize("wrong", [None, "loan", "resident"])
def test_a_loan_that_brings_other_bytes_is_refused(wrong: str | None) -> None:
    """Three loans take turns in two slots."""
    units = [lent(number) for number in range(3)]
    slots = [torch.empty(2 * ROW, dtype=torch.int8) for _ in range(2)]
    loans = [
        LoanCopy(large, slots[number % 2], number - 2 if number > 1 else None)
        for number, (large, _, _) in enumerate(units)
    ]
    residents, promises = [small for _, small, _ in units], [each for *_, each in units]
    if wrong is None:
        prove_loans(LoanRing(loans), residents, promises)
        return
    (units[2][0] if wrong == "loan" else residents[2])[77] ^= 4
    with pytest.raises(ViewError, match=r"layer\.2 differs from what rank 3 lends: restart"):
        prove_loans(LoanRing(loans), residents, promises)


def test_a_copy_that_a_rank_keeps_is_compared_as_well() -> None:
    units = [lent(number) for number in range(3)]
    copies, promises = [(each[0], each[1]) for each in units], [each[2] for each in units]
    prove_copies(copies, promises)
    prove_copies([], [])
    copies[1][1][0] ^= 1
    with pytest.raises(ViewError, match=r"layer\.1 differs from what rank 2 lends"):
        prove_copies(copies, promises)

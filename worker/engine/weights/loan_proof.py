"""Proves at start-up that a rank's loans bring what their lenders hold.

A wrong address, layout or copy gives fluent garbage and no error. So each loan is copied once as in
a step, through its slot of the ring, and its checksum compared with its lender's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engine.weights.checksums import checksum, numbers_of
from worker.engine.weights.layers import ViewError
from worker.engine.weights.manifest import UnitSums
from worker.engine.weights.ring import LoanRing


@dataclass(frozen=True, slots=True)
class Promise:
    """What a loan must bring: a unit, or a piece of it, as a rank lends it."""

    unit: str
    lender: int
    sums: UnitSums


def prove_loans(
    ring: LoanRing, residents: Sequence[torch.Tensor], promises: Sequence[Promise]
) -> None:
    """Copy every loan once and compare it, and the tensors that were copied beside it.

    `residents` are (bytes,) int8; they and `promises` are by number of the loan.

    Raises:
        ViewError: names the first unit that differs, its lender, and a remedy.
    """
    sums: list[torch.Tensor] = []
    ring.begin_step()
    for number, resident in enumerate(residents):
        with ring.use(number):
            sums.append(checksum(ring.loans[number].slot))
        sums.append(checksum(resident))
    _compare(sums, promises)


def prove_copies(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]], promises: Sequence[Promise]
) -> None:
    """Compare units that a rank has copied or reads in place: large tensors and small ones, int8.

    Raises:
        ViewError: as `prove_loans`.
    """
    _compare([checksum(each) for copy in copies for each in copy], promises)


def _compare(sums: Sequence[torch.Tensor], promises: Sequence[Promise]) -> None:
    """Compare two checksums each, of the large tensors and of the small ones, with promises."""
    found = numbers_of(sums)
    for promise, loan, resident_sum in zip(promises, found[::2], found[1::2], strict=True):
        if promise.sums != UnitSums((loan,), resident_sum):
            raise ViewError(
                f"the copy of {promise.unit} differs from what rank {promise.lender} lends: "
                "restart the cell; if it happens again, start it with --borrow none, test the "
                "memory and links of this host, and please report it."
            )

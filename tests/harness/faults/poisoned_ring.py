"""A ring whose slots hold NaN while no step may read them.

Before the first copy of a step, and as soon as a loan's use ends, each byte of a slot is 0xFF: in
every floating-point type of weights that is NaN. A layer that computes with a slot too early or too
late then gives NaN instead of what an earlier copy happens to have left there.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from worker.engine.weights import lending
from worker.engine.weights.ring import DeviceRing, LoanCopy, LoanRing

POISON = -1
"""0xFF as int8."""

spoiled = Counter[int]()
"""How often the slot of each loan was spoiled after its use."""


class PoisonedRing(LoanRing):
    """The ring on CPU."""

    def begin_step(self) -> None:
        """Spoil all slots, then begin."""
        for loan in self.loans:
            loan.slot.fill_(POISON)
        super().begin_step()

    def _end_use(self, number: int) -> None:
        self.loans[number].slot.fill_(POISON)
        spoiled[number] += 1
        super()._end_use(number)


class PoisonedDeviceRing(PoisonedRing, DeviceRing):
    """The ring on CUDA: the stream that computes spoils, and copies wait for it as for a use."""


def poisoned_ring(loans: Sequence[LoanCopy], device: torch.device) -> LoanRing:
    """Stand in for `make_ring`."""
    return PoisonedDeviceRing(loans, device) if device.type == "cuda" else PoisonedRing(loans)


def install() -> None:
    """Let this process make such rings from now on."""
    lending.make_ring = poisoned_ring  # type: ignore[attr-defined]

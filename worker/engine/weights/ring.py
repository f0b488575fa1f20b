"""The ring of a rank's loans: copies of peers' parts beside a step, each in its slot.

SiDP (section 4.2, weights as a service) reads weights from their owners without the owners' help.
Here the driver's copy engine does so on a stream of its own: a kernel that copies would take
multiprocessors from the step. Events order copies and uses, so a step asks no peer for anything,
and a step that is captured in a CUDA graph contains its loans. A step begins with an empty ring and
ends with an empty ring: any step may follow any other. On CPU a loan is copied when its slot is
free.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

REPEATS = 3
"""Measurements of the floor; the median counts."""


class LoanCopyError(RuntimeError):
    """The driver refuses a copy from a peer's memory; one sentence with its error."""


@dataclass(frozen=True, slots=True)
class LoanCopy:
    """One loan's memory: `source` of a lender, `slot` of the ring, both (bytes,) int8.

    `after` is the number of the earlier loan whose use frees the slot; None: it is free.
    """

    source: torch.Tensor
    slot: torch.Tensor
    after: int | None


class LoanRing:
    """Copies the loans of a step in their order, and says when each can be used."""

    def __init__(self, loans: Sequence[LoanCopy]) -> None:
        self.loans = tuple(loans)
        self.step_bytes = sum(loan.slot.numel() for loan in loans)
        """Bytes that one step borrows."""
        self.wait_s = 0.0
        """How long computation has waited for copies; counted on CPU, where it always does."""
        self._next, self._uses = 0, 0

    def begin_step(self) -> None:
        """Begin to copy: after all that the current stream has launched."""
        self._next, self._uses = 0, 0
        self._copy_on(None)

    def abort_step(self) -> None:
        """Let later work wait for the copies of a step that has ended before their uses."""

    def run_alone(self) -> None:
        """Copy all loans of a step that computes nothing: its floor."""
        self.begin_step()
        for number in range(len(self.loans)):
            with self.use(number):
                pass

    def floor_s(self) -> float:
        """Return the seconds of a step's loans alone; all ranks must measure at once."""
        samples = []
        for _ in range(1 + REPEATS):
            self._synchronize()
            started = time.perf_counter()
            self.run_alone()
            self._synchronize()
            samples.append(time.perf_counter() - started)
        return median(samples[1:])

    def _synchronize(self) -> None:
        """Wait until the device has done all copies."""

    @contextmanager
    def use(self, number: int) -> Iterator[None]:
        """Compute with a loan inside; afterwards its slot may be written again.

        Loans are used in their order, each once: in any other, a slot would hold another loan.
        """
        assert number == self._uses < self._next, "a loan is used out of turn."
        self._uses += 1
        self._wait(number)
        yield
        self._end_use(number)
        self._copy_on(number)

    def _copy_on(self, freed: int | None) -> None:
        """Launch all copies, in order, whose slots are free or become so after this use."""
        while self._next < len(self.loans):
            after = self.loans[self._next].after
            if after is not None and (freed is None or after > freed):
                return
            self._copy(self._next)
            self._next += 1

    def _copy(self, number: int) -> None:
        loan, started = self.loans[number], time.perf_counter()
        loan.slot.copy_(loan.source)
        self.wait_s += time.perf_counter() - started

    def _wait(self, number: int) -> None:
        """Let the current stream continue only after a loan's copy."""

    def _end_use(self, number: int) -> None:
        """Mark that what the current stream has launched has used a loan."""


class DeviceRing(LoanRing):
    """The ring of a rank on CUDA."""

    def __init__(self, loans: Sequence[LoanCopy], device: torch.device) -> None:
        super().__init__(loans)
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in loans]
        self._used = [torch.cuda.Event() for _ in loans]
        self._driver: Any = ctypes.CDLL("libcuda.so.1")

    def begin_step(self) -> None:
        """See `LoanRing`."""
        # The fork: copies of the step before have all been awaited by its uses.
        if self.loans:
            self._stream.wait_stream(torch.cuda.current_stream())
        super().begin_step()

    def abort_step(self) -> None:
        """See `LoanRing`."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def _copy(self, number: int) -> None:
        loan = self.loans[number]
        if loan.after is not None:
            self._stream.wait_event(self._used[loan.after])
        status = self._driver.cuMemcpyAsync(
            ctypes.c_uint64(loan.slot.data_ptr()),
            ctypes.c_uint64(loan.source.data_ptr()),
            ctypes.c_size_t(loan.slot.numel()),
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        if status:
            raise LoanCopyError(
                f"the CUDA driver cannot copy a peer's weights (error {status}): start the cell "
                "with --borrow none, and please report it."
            )
        self._copied[number].record(self._stream)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._stream.device)

    def _wait(self, number: int) -> None:
        torch.cuda.current_stream().wait_event(self._copied[number])

    def _end_use(self, number: int) -> None:
        self._used[number].record()


def make_ring(loans: Sequence[LoanCopy], device: torch.device) -> LoanRing:
    """Return the ring of a device."""
    return DeviceRing(loans, device) if device.type == "cuda" else LoanRing(loans)

"""Copies units between KV memories that this process can address: on the GPU or with numpy.

A *memory* is a 1-D int8 tensor of `num_layers` equal, consecutive regions. Unit n is bytes
n·unit_bytes and up, counted through all regions, in its first layer, and as far into each region
that follows in the others. A copy moves one unit in all its layers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvadaptor.transfer.rounds import MoveError, Units

if TYPE_CHECKING:
    from kvadaptor.transfer.copy_kernel import Shape

PIECE_BYTES = 1 << 20
"""Bytes that a CPU copy reads before it writes: staging that stays in the cache."""

SLICES = 64
"""Number of turns in which the sources of one launch alternate, so that all links stay busy."""

TABLE_ROWS = 4


@dataclass(frozen=True, slots=True)
class Regions:
    """The layers of a unit, the same in all jobs of a call, and their distances in two memories."""

    layers: int
    source_bytes: int
    target_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """`source_units[i]` of one memory to `target_units[i]` of another, for all i; both (c,)."""

    source: torch.Tensor
    source_units: Units
    target: torch.Tensor
    target_units: Units
    regions: Regions | None = None
    """None: units have all layers of both memories, which is as many as the copier's."""

    @property
    def size(self) -> int:
        """Number of copies."""
        return int(self.source_units.size)


class Copier(Protocol):
    """Runs copies in any order; they may be in flight until `finish`."""

    is_asynchronous: bool
    """Whether `copy` returns while the device copies."""

    def copy(self, jobs: Sequence[Copies], unit_bytes: int) -> None:
        """Start all copies; no job's source unit may be a target unit of any job."""

    def finish(self) -> float:
        """Wait until all copies are done; return the seconds that they took."""

    def warm(self, memory: torch.Tensor, unit_bytes: int, copies: int) -> None:
        """Prepare for that many copies of units of that size, so that the first is not slower."""


def make_copier(num_layers: int, device: torch.device) -> Copier:
    """Return the copier for memory of that device."""
    return KernelCopier(num_layers, device) if device.type == "cuda" else ArrayCopier(num_layers)


class ArrayCopier:
    """Copies with numpy, in pieces of `PIECE_BYTES`; `copy` returns when they are done."""

    is_asynchronous = False

    def __init__(self, num_layers: int) -> None:
        self._layers = num_layers
        self._seconds = 0.0

    def copy(self, jobs: Sequence[Copies], unit_bytes: int) -> None:
        """Copy layer by layer; see `Copier`."""
        started = time.perf_counter()
        step = max(1, PIECE_BYTES // unit_bytes)
        for job in jobs:
            source, target = _rows(job.source, unit_bytes), _rows(job.target, unit_bytes)
            regions = _regions(job, self._layers)
            source_units = regions.source_bytes // unit_bytes
            target_units = regions.target_bytes // unit_bytes
            for layer in range(regions.layers):
                for first in range(0, job.size, step):
                    piece = slice(first, first + step)
                    # Neighbouring units need no merging: one memcpy copies a row anyway.
                    rows = source[layer * source_units :].take(job.source_units[piece], axis=0)
                    target[layer * target_units :][job.target_units[piece]] = rows
        self._seconds += time.perf_counter() - started

    def finish(self) -> float:
        """Return the seconds; no copy is ever in flight."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def warm(self, memory: torch.Tensor, unit_bytes: int, copies: int) -> None:
        """Do nothing: there is nothing to prepare."""


def _regions(job: Copies, num_layers: int) -> Regions:
    if job.regions is not None:
        return job.regions
    sizes = (memory.numel() // num_layers for memory in (job.source, job.target))
    return Regions(num_layers, *sizes)


def _rows(memory: torch.Tensor, unit_bytes: int) -> npt.NDArray[np.int8]:
    """Return the memory as (units, unit_bytes)."""
    rows: npt.NDArray[np.int8] = memory.numpy().reshape(-1, unit_bytes)
    return rows


class KernelCopier:
    """Copies with one kernel launch per call, on the current stream of its device.

    On the current stream the copies follow earlier writes (forward steps) and precede later work,
    without a wait. That does not order writes of other ranks: the caller synchronizes with them
    before and after. Also runs on CPU tensors in Triton's interpreter.
    """

    is_asynchronous = True

    def __init__(
        self, num_layers: int, device: torch.device, *, shape: "Shape | None" = None
    ) -> None:
        # Triton is imported here, as CPU ranks do not need it.
        from kvadaptor.transfer import copy_kernel

        self._kernel = copy_kernel
        self._shape = shape or copy_kernel.Shape()
        self._layers = num_layers
        self._device = device
        self._capacity = self._used = 0
        self._seconds = 0.0
        """Host seconds since `finish`."""
        self._spans: list[tuple[Any, Any]] = []
        """Device events around each launch since `finish`."""

    def warm(self, memory: torch.Tensor, unit_bytes: int, copies: int) -> None:
        """Compile the kernel for this unit size and allocate the memory for `copies` copies."""
        if copies > self._capacity:
            self._reserve(copies)
        zero = np.zeros(1, dtype=np.int64)
        # Unit 0 onto itself: it belongs to the null page and does not change.
        self.copy([Copies(memory, zero, memory, zero)], unit_bytes)
        self.finish()

    def copy(self, jobs: Sequence[Copies], unit_bytes: int) -> None:
        """Send all copies to the device in one asynchronous transfer and launch; see `Copier`.

        Raises `MoveError` for units or memory that are not whole 16-byte words.
        """
        jobs = [job for job in jobs if job.size]
        count = sum(job.size for job in jobs)
        if not count:
            return
        started = time.perf_counter()
        word = self._kernel.WORD_BYTES
        if unit_bytes % word:
            raise MoveError(f"units of {unit_bytes} bytes are not a multiple of {word}.")
        base = jobs[0].target[:word].view(torch.int64)
        columns = [self._columns(job, base.data_ptr(), unit_bytes) for job in jobs]
        first = self._take(count)
        span = slice(TABLE_ROWS * first, TABLE_ROWS * (first + count))
        # Sources alternate slice by slice, else all ranks would read from one of them at a time.
        turns = [(np.arange(job.size) * SLICES // job.size).astype(np.uint8) for job in jobs]
        order = np.argsort(np.concatenate(turns), kind="stable")
        rows = self._pinned[span].numpy().reshape(TABLE_ROWS, count)
        rows[:] = np.concatenate(columns, axis=1)[:, order]
        table = self._table[span]
        with self._on_device():
            begun = self._event()
            table.copy_(self._pinned[span], non_blocking=True)
            if begun is not None:
                self._seconds += time.perf_counter() - started
            layers = _regions(jobs[0], self._layers).layers
            self._kernel.launch(base, table, count, layers, unit_bytes // word, self._shape)
            if begun is None:
                self._seconds += time.perf_counter() - started
            else:
                self._spans.append((begun, self._event()))

    def _event(self) -> Any:
        """Return an event at the current place of the current stream; None without CUDA."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> float:
        """Wait for the current stream."""
        self._wait()
        on_device = sum(float(begun.elapsed_time(end)) for begun, end in self._spans) / 1e3
        seconds = self._seconds + on_device
        self._seconds, self._spans = 0.0, []
        return seconds

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._used = 0

    def _columns(self, job: Copies, base: int, unit_bytes: int) -> Units:
        """Return (4, c): see `copy_kernel.launch`."""
        columns = np.empty((TABLE_ROWS, job.size), dtype=np.int64)
        regions = _regions(job, self._layers)
        sides = (
            (job.source, job.source_units, regions.source_bytes),
            (job.target, job.target_units, regions.target_bytes),
        )
        for side, (memory, units, region) in enumerate(sides):
            distance = memory.data_ptr() - base
            if region % self._kernel.WORD_BYTES or distance % self._kernel.WORD_BYTES:
                raise MoveError("a layer's memory does not start at a multiple of 16 bytes.")
            columns[2 * side] = (distance + units * unit_bytes) // self._kernel.WORD_BYTES
            columns[2 * side + 1] = region // self._kernel.WORD_BYTES
        return columns

    def _take(self, count: int) -> int:
        """Return where the tables have room that no earlier transfer still reads."""
        if self._used + count > self._capacity:
            self._wait()
            if count > self._capacity:
                self._reserve(count)
        first = self._used
        self._used += count
        return first

    def _reserve(self, copies: int) -> None:
        self._wait()
        on_cuda = self._device.type == "cuda"
        size = TABLE_ROWS * copies
        self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=on_cuda)
        self._table = torch.empty(size, dtype=torch.int64, device=self._device)
        self._capacity = copies

    def _on_device(self) -> Any:
        """Make this device current: Triton launches on the current one."""
        return torch.cuda.device(self._device if self._device.type == "cuda" else -1)

"""Activations from one pipeline stage to the next on CUDA, through memory of the host.

As `comm_pool.cpu.stage_link`: a ring of pieces, and a word of progress at each end. Here devices do
all of it. A copy engine writes a piece, another reads it, and streams wait for words (the driver's
stream memory operations), so the host only launches and no kernel spins. Neither collectives nor
peer access are needed: a device's link to the host carries 50 GB/s each way at once, and a step's
activations are 1/100 of what its weights and products take.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from comm_pool.cpu.cell_memory import FENCE
from comm_pool.cpu.shared_plane import SEQUENCE_BITS
from comm_pool.formations import Formations, PeerLostError
from comm_pool.stages.links import LinkEnd
from kvadaptor.transfer.boxes import HostCopyError, address_in, fill_memory, register
from kvadaptor.transfer.driver import DriverError, call_driver

PIECE_BYTES = 8 << 20
"""A piece takes 0.16 ms, so the other end begins that much later; each costs three launches."""

PIECES = 6

WORD_BYTES = 8
_WRITTEN, _READ = 0, 1
_COUNT_MASK = (1 << SEQUENCE_BITS) - 1
_AT_LEAST = 0
"""The driver's CU_STREAM_WAIT_VALUE_GEQ."""


class StageLinkError(RuntimeError):
    """Devices cannot exchange activations; the message is one sentence."""


class WorkQueue(Protocol):
    """Work that a device does in order, beside its other work; addresses are the host's too."""

    def wait_for(self, word: int, value: int) -> None:
        """Go on once the word at this address has at least this value."""

    def set_word(self, word: int, value: int) -> None:
        """Write a word after all before it."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes between the device and memory of the host."""

    def done(self) -> Callable[[], bool]:
        """Return a query for whether all of it until now is over; any thread."""


class StreamQueue:
    """A stream of a CUDA device; raises `StageLinkError`."""

    def __init__(self, device: torch.device) -> None:
        # Before the kernels of steps: the next stage idles until the copies are over.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def wait_for(self, word: int, value: int) -> None:
        """See `WorkQueue`."""
        self._launch("cuStreamWaitValue64_v2", self._handle, *_of_word(word, value, _AT_LEAST))

    def set_word(self, word: int, value: int) -> None:
        """See `WorkQueue`."""
        self._launch("cuStreamWriteValue64_v2", self._handle, *_of_word(word, value, 0))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """See `WorkQueue`."""
        sides = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._launch("cuMemcpyAsync", *sides, ctypes.c_size_t(num_bytes), self._handle)

    def done(self) -> Callable[[], bool]:
        """See `WorkQueue`."""
        event = self.stream.record_event()
        return lambda: bool(event.query())

    @property
    def _handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream.cuda_stream)

    def _launch(self, name: str, *arguments: Any) -> None:
        error = call_driver(name, *arguments)
        if error:
            raise StageLinkError(f"{name} between pipeline stages failed ({error}).")


def _of_word(word: int, value: int, flags: int) -> tuple[Any, ...]:
    return ctypes.c_uint64(word), ctypes.c_uint64(value), ctypes.c_uint(flags)


def device_link_bytes() -> int:
    """Return the bytes of the memory of one link."""
    return mmap.PAGESIZE + PIECES * PIECE_BYTES


class DeviceStageLink:
    """One end of a link; see `LinkEnd`. Its methods return once all is launched.

    Of an aborted formation's messages no byte counts, whatever came through.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        formations: Formations,
        is_aborted: Callable[[int], bool],
        *,
        sends: bool,
        queue: WorkQueue,
    ) -> None:
        """`memory` is of `device_link_bytes`, which `queue` can reach."""
        self.queue = queue
        self._formations, self._is_aborted = formations, is_aborted
        self._words = memoryview(memory).cast("q")[:2]
        """The progress of both ends: a formation and a number of pieces."""
        base = address_in(memory, 0)
        own, other = (_WRITTEN, _READ) if sends else (_READ, _WRITTEN)
        self._own_word, self._other_word = (base + WORD_BYTES * each for each in (own, other))
        self._first_piece = base + mmap.PAGESIZE
        self._formation = self._count = 0
        self._words[own] = 0

    @property
    def formation(self) -> int:
        """See `LinkEnd`."""
        return self._formations.formation

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors of any shapes, which must stay as they are until that is over."""
        for address, num_bytes in self._cut(tensors):
            if self._count >= PIECES:
                self.queue.wait_for(self._other_word, self._value(self._count - PIECES + 1))
            self.queue.copy(self._piece, address, num_bytes)
            self._publish()

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `LinkEnd`."""
        for address, num_bytes in self._cut(tensors):
            self.queue.wait_for(self._other_word, self._value(self._count + 1))
            self.queue.copy(address, self._piece, num_bytes)
            self._publish()

    def done(self) -> Callable[[], bool]:
        """See `LinkEnd`: a message to a lost stage is over once it is released."""
        return self.queue.done()

    def release(self) -> None:
        """Let streams go on that wait in an aborted formation; any thread.

        Repeat it while it is wanted: a copy of the other end may still set an older word.
        """
        formation = self._formation
        if self._formations.is_aborted(formation) or self._is_aborted(formation):
            with FENCE:
                self._words[_WRITTEN] = self._words[_READ] = self._value(_COUNT_MASK)

    @property
    def _piece(self) -> int:
        return self._first_piece + self._count % PIECES * PIECE_BYTES

    def _value(self, count: int) -> int:
        return (self._formation << SEQUENCE_BITS) + count

    def _publish(self) -> None:
        self._count += 1
        self.queue.set_word(self._own_word, self._value(self._count))

    def _cut(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
        """Begin a message in the formation of now; yield address and length of its pieces."""
        formation = self._formations.formation
        if self._formations.is_aborted(formation) or self._is_aborted(formation):
            raise PeerLostError(formation)
        if formation != self._formation:
            self._formation, self._count = formation, 0
        for tensor in tensors:
            address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            for first in range(0, num_bytes, PIECE_BYTES):
                yield address + first, min(PIECE_BYTES, num_bytes - first)


def stream_of(end: LinkEnd) -> torch.cuda.Stream:
    """Return the stream on which an end of a link copies."""
    assert isinstance(end, DeviceStageLink) and isinstance(end.queue, StreamQueue)
    return end.queue.stream


def make_device_link(
    device: torch.device,
    memory: mmap.mmap,
    formations: Formations,
    is_aborted: Callable[[int], bool],
    *,
    sends: bool,
) -> DeviceStageLink:
    """Return an end whose memory the device can reach.

    Raises `StageLinkError` if that, or letting a stream wait for a word, is beyond the driver.
    """
    queue, address = StreamQueue(device), address_in(memory, 0)
    try:
        fill_memory(memory, 0, len(memory))
        register(address, len(memory))
        queue.wait_for(address, 0)
        link = DeviceStageLink(memory, formations, is_aborted, sends=sends, queue=queue)
        queue.stream.synchronize()
    except (DriverError, HostCopyError, StageLinkError) as error:
        raise StageLinkError(
            f"pipeline stages exchange activations through {len(memory) >> 20} MiB of host memory, "
            f"for which the CUDA driver is not fit here ({error}): raise the limit of locked "
            "memory (ulimit -l), or leave pp groups out of --pipelines and --layout."
        ) from error
    return link

"""Copies of boxes between a device and memory of the host: runs of bytes, one for each layer.

The copy engine moves a box in one operation: 51 GB/s on an H200 for runs of 64 KiB, 44 for 32 KiB,
33 for 16 KiB, for 3 µs of the host's time each. Batches of single runs (`cuMemcpyBatchAsync`, which
vLLM's offloading uses) reach 31, 22 and 14 GB/s there, for 14 µs. All boxes are one call of the
driver: a thread for them would have to wait for Python's lock, up to 5 ms at a time, whenever the
main loop of its process computes.
"""

import ctypes
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvadaptor.transfer.driver import call_driver

Addresses = npt.NDArray[np.uint64] | list[int]


class HostCopyError(RuntimeError):
    """The CUDA driver refuses to register host memory, or to copy; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes in one memory; the runs of a box lie `pitch` · `height` bytes apart.

    `addresses` (n,) are those of their first runs. A pitch is at least as long as a run.
    """

    addresses: Addresses
    pitch: int
    height: int
    on_device: bool


class Copying(Protocol):
    """Copies that were launched."""

    def is_over(self) -> bool:
        """Return whether they are over; any thread."""

    def order(self) -> None:
        """Let the caller's later work wait for them; any thread."""


class BoxCopier(Protocol):
    """Copies boxes, in the order of its calls."""

    def copy(
        self, sources: Boxes, targets: Boxes, run_bytes: int, layers: int, *, waits: bool = True
    ) -> Copying:
        """Copy each source to its target.

        `waits`: after all that the caller has launched; else after the copies before these alone.
        """


class Copied:
    """Copies that were over when they were launched."""

    def is_over(self) -> bool:
        """See `Copying`."""
        return True

    def order(self) -> None:
        """See `Copying`."""


class HostBoxCopier:
    """Copies boxes of memory of this process, at once."""

    def copy(
        self, sources: Boxes, targets: Boxes, run_bytes: int, layers: int, **_: bool
    ) -> Copied:
        """See `BoxCopier`."""
        for layer in range(layers):
            to = layer * targets.pitch * targets.height
            of = layer * sources.pitch * sources.height
            pairs = zip(_listed(targets.addresses), _listed(sources.addresses), strict=True)
            for target, source in pairs:
                ctypes.memmove(target + to, source + of, run_bytes)
        return Copied()


def _listed(addresses: Addresses) -> list[int]:
    return addresses if isinstance(addresses, list) else addresses.tolist()


def _side(name: str) -> list[tuple[str, str]]:
    """Return the fields of one side of the driver's CUDA_MEMCPY3D_BATCH_OP, for a pointer."""
    kinds = (("kind", "<i4"), ("pad", "<i4"), ("address", "<u8"), ("pitch", "<u8"))
    more = (("height", "<u8"), ("place", "<i4"), ("device", "<i4"))
    return [(f"{name}_{field}", kind) for field, kind in (*kinds, *more)]


BOX_FIELDS = np.dtype(
    [
        *_side("source"),
        *_side("target"),
        *(("run", "<u8"), ("rows", "<u8"), ("layers", "<u8"), ("order", "<i4"), ("flags", "<u4")),
    ]
)
"""One copy of a box, as the driver has it."""

BOXES_AT_FIRST = 64
"""Boxes that a copier has room for before it needs more."""

_POINTER = 1
_ON_DEVICE, _ON_HOST = 1, 2
_STREAM_ORDER = 1
"""Numbers of the driver."""


class StreamCopying:
    """Copies on a stream; see `Copying`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_over(self) -> bool:
        """See `Copying`."""
        return bool(self._event.query())

    def order(self) -> None:
        """See `Copying`: later work on the thread's current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class DeviceBoxCopier:
    """Lets the copy engine move boxes, on a stream of its own."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """Work of a lower number goes first; 0 is the last."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._boxes = np.empty(BOXES_AT_FIRST, BOX_FIELDS)
        self._fields: tuple[int, ...] = ()
        """What all boxes have in common, without their addresses: mostly the same as before."""

    def copy(
        self, sources: Boxes, targets: Boxes, run_bytes: int, layers: int, *, waits: bool = True
    ) -> StreamCopying:
        """See `BoxCopier`; raises `HostCopyError`."""
        count = len(sources.addresses)
        if count > self._boxes.size:
            self._boxes, self._fields = np.empty(2 * count, BOX_FIELDS), ()
        of_boxes = (run_bytes, 1, layers, _STREAM_ORDER, 0)
        fields = (*self._fields_of(sources), *self._fields_of(targets), *of_boxes)
        if fields != self._fields:
            self._boxes[:] = self._fields = fields
        boxes = self._boxes[:count]
        boxes["source_address"], boxes["target_address"] = sources.addresses, targets.addresses
        if waits:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        failed = ctypes.c_size_t()
        error = call_driver(
            "cuMemcpy3DBatchAsync",
            *(ctypes.c_size_t(count), ctypes.c_void_p(self._boxes.ctypes.data)),
            *(ctypes.byref(failed), ctypes.c_uint64(0), ctypes.c_void_p(self._stream.cuda_stream)),
        )
        if error:
            raise HostCopyError(
                f"the CUDA driver does not copy KV to or from host memory ({error}): start "
                "without it (--host-kv 0, cell.peer_access auto)."
            )
        event = torch.cuda.Event()
        event.record(self._stream)
        return StreamCopying(event, self._device)

    def _fields_of(self, side: Boxes) -> tuple[int, ...]:
        """Return the fields of one side of all boxes, without their addresses."""
        place = _ON_DEVICE if side.on_device else _ON_HOST
        device = (self._device.index or 0) if side.on_device else 0
        return (_POINTER, 0, 0, side.pitch, side.height, place, device)


def make_box_copier(device: torch.device, priority: int = 0) -> BoxCopier:
    """Return the copier between the host and that device."""
    return DeviceBoxCopier(device, priority) if device.type == "cuda" else HostBoxCopier()


# ------------------------------------------------------------------------------ host memory


def bind_device(device: torch.device) -> None:
    """Let the calling thread's calls of the driver mean this device."""
    torch.cuda.set_device(device)
    # Only a call of CUDA's runtime makes the device's context that of the thread.
    torch.cuda.current_stream(device).query()


def fill_memory(memory: mmap.mmap, first: int, num_bytes: int) -> None:
    """Let a piece of mapped memory take real pages, outside of Python's lock; any thread."""
    address = ctypes.c_void_p(address_in(memory, first))
    _libc.madvise(address, ctypes.c_size_t(num_bytes), _POPULATE_WRITE)


def register(address: int, num_bytes: int, *, is_own: bool = True) -> None:
    """Let CUDA's copy engines reach host memory directly; any thread with a device.

    It takes a tenth of the time where the memory was filled. Memory of others is read alone. Raises
    `HostCopyError`.
    """
    flags = ctypes.c_uint(_PORTABLE if is_own else _PORTABLE | _READ_ONLY)
    where = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    error = call_driver("cuMemHostRegister_v2", *where, flags)
    if error:
        raise HostCopyError(
            f"the CUDA driver cannot register {num_bytes >> 20} MiB of host memory ({error}): give "
            "less (--host-kv), or 0."
        )


def address_in(memory: mmap.mmap, first: int) -> int:
    """Return the address of a place in mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, first))


_libc = ctypes.CDLL(None)
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE. Older kernels refuse it; then registering fills the memory."""
_PORTABLE, _READ_ONLY = 1, 8
"""For all contexts of the process; for reading alone."""

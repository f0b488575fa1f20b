"""Copies between a rank's KV memory and host pages: which slots, and how CPU and CUDA copy them.

A share of a host page is one slot of the rank's memory: per layer one run of bytes. On CUDA the
copy engine moves a share in one operation, as a box of one run by its layers: 51 GB/s on an H200
for runs of 64 KiB, 44 for 32 KiB, 33 for 16 KiB, for 3 µs of the host's time each. Batches of
single runs (`cuMemcpyBatchAsync`, which vLLM's offloading uses) reach 31, 22 and 14 GB/s there, for
14 µs.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvadaptor.geometry import PageGeometry
from kvadaptor.transfer.driver import call_driver

Bytes = npt.NDArray[np.uint8]

STORE_PRIORITY = 0
"""CUDA's lowest priority of a stream."""


class HostCopyError(RuntimeError):
    """The CUDA driver refuses to register host memory, or to copy; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Shares of host pages and the slots of a rank that hold the same KV, (n,) of either.

    `slots` tile a page of the rank's group, `share` is which of a host page's shares it has, and
    `numbers` are the rank's slots as its kernels number them: `slots` · page + slot.
    """

    slots: int
    share: int
    numbers: Sequence[int]
    pages: Sequence[int]

    def part(self, first: int, last: int) -> "PageCopies":
        """Return the copies from number `first` to before `last`."""
        numbers, pages = self.numbers[first:last], self.pages[first:last]
        return PageCopies(self.slots, self.share, numbers, pages)


class Copying(Protocol):
    """Copies that were launched."""

    def is_over(self) -> bool:
        """Return whether they are over; any thread."""

    def order(self) -> None:
        """Let the caller's later work wait for them; any thread."""


class PageCopier(Protocol):
    """Copies shares in one direction."""

    def launch(self, copies: PageCopies) -> Copying:
        """Copy after all that the caller has launched, and after the copies before these."""


class Copied:
    """Copies that were over when they were launched."""

    def is_over(self) -> bool:
        """See `Copying`."""
        return True

    def order(self) -> None:
        """See `Copying`."""


class ArrayCopier:
    """Copies between two arrays, at once."""

    def __init__(self, pages: Bytes, kv: Bytes, geometry: PageGeometry, *, loads: bool) -> None:
        """`pages` is (pages, layers, bytes of a page in one layer), `kv` (layers, bytes)."""
        self._pages, self._kv, self._geometry = pages, kv, geometry
        self._loads = loads

    def launch(self, copies: PageCopies) -> Copied:
        """See `PageCopier`."""
        layers, slot_bytes = self._kv.shape[0], self._geometry.layer_page_bytes // copies.slots
        own = self._kv.reshape(layers, -1, slot_bytes)
        host = self._pages.reshape(-1, layers, copies.slots, slot_bytes)
        numbers, pages = list(copies.numbers), list(copies.pages)
        if self._loads:
            own[:, numbers] = host[pages, :, copies.share].transpose(1, 0, 2)
        else:
            host[pages, :, copies.share] = own[:, numbers].transpose(1, 0, 2)
        return Copied()


def _side(name: str) -> list[tuple[str, str]]:
    """Return the fields of one side of the driver's CUDA_MEMCPY3D_BATCH_OP, for a pointer."""
    kinds = (("kind", "<i4"), ("pad", "<i4"), ("address", "<u8"), ("pitch", "<u8"))
    more = (("height", "<u8"), ("place", "<i4"), ("device", "<i4"))
    return [(f"{name}_{field}", kind) for field, kind in (*kinds, *more)]


_BOX = np.dtype(
    [
        *_side("source"),
        *_side("target"),
        *(("width", "<u8"), ("rows", "<u8"), ("layers", "<u8"), ("order", "<i4"), ("flags", "<u4")),
    ]
)
"""One box to copy: `layers` runs of `width` bytes, on each side `pitch` · `height` bytes apart."""

_POINTER = 1
_ON_DEVICE, _ON_HOST = 1, 2
_STREAM_ORDER = 1
"""Numbers of the driver."""


class DeviceCopying:
    """Copies on a stream; see `Copying`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def is_over(self) -> bool:
        """See `Copying`."""
        return bool(self._event.query())

    def order(self) -> None:
        """See `Copying`: later work on the thread's current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class DeviceCopier:
    """Lets the copy engine move shares, on a stream of its own.

    All copies of a step are one call of the driver. A thread for them would have to wait for
    Python's lock, up to 5 ms at a time, whenever the rank's main loop computes.
    """

    def __init__(
        self, address: int, kv: torch.Tensor, geometry: PageGeometry, *, loads: bool
    ) -> None:
        """The pages lie at `address`, in registered memory; `kv` is the rank's, (bytes,) int8."""
        self._geometry, self._device = geometry, kv.device
        self._stream = torch.cuda.Stream(kv.device, priority=STORE_PRIORITY)
        pitch = geometry.layer_page_bytes
        own = (kv.data_ptr(), kv.numel() // geometry.page_bytes, _ON_DEVICE, kv.device.index or 0)
        host = (address, 1, _ON_HOST, 0)
        names = ("target", "source") if loads else ("source", "target")
        self._own, self._host = names
        self._addresses = own[0], host[0]
        self._box = np.zeros(1, _BOX)
        for name, (_, height, place, device) in zip(names, (own, host), strict=True):
            self._box[f"{name}_kind"], self._box[f"{name}_pitch"] = _POINTER, pitch
            self._box[f"{name}_height"], self._box[f"{name}_place"] = height, place
            self._box[f"{name}_device"] = device
        self._box["rows"], self._box["layers"] = 1, geometry.num_layers
        self._box["order"] = _STREAM_ORDER

    def launch(self, copies: PageCopies) -> DeviceCopying:
        """See `PageCopier`; raises `HostCopyError`."""
        geometry, count = self._geometry, len(copies.pages)
        slot_bytes = geometry.layer_page_bytes // copies.slots
        boxes = np.repeat(self._box, count)
        boxes["width"] = slot_bytes
        numbers, pages = (np.array(each, np.uint64) for each in (copies.numbers, copies.pages))
        own, host = self._addresses
        boxes[f"{self._own}_address"] = numbers * np.uint64(slot_bytes) + np.uint64(own)
        first = np.uint64(host + copies.share * slot_bytes)
        boxes[f"{self._host}_address"] = pages * np.uint64(geometry.page_bytes) + first
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        failed = ctypes.c_size_t()
        error = call_driver(
            "cuMemcpy3DBatchAsync",
            *(ctypes.c_size_t(count), ctypes.c_void_p(boxes.ctypes.data), ctypes.byref(failed)),
            *(ctypes.c_uint64(0), ctypes.c_void_p(self._stream.cuda_stream)),
        )
        if error:
            raise HostCopyError(
                f"the CUDA driver does not copy KV to or from host memory ({error}): start "
                "without it (--host-kv 0)."
            )
        event = torch.cuda.Event()
        event.record(self._stream)
        return DeviceCopying(event, self._device)


def bind_device(device: torch.device) -> None:
    """Let the calling thread's calls of the driver mean this device."""
    torch.cuda.set_device(device)
    # Only a call of CUDA's runtime makes the device's context that of the thread.
    torch.cuda.current_stream(device).query()


def fill_memory(memory: mmap.mmap, first: int, num_bytes: int) -> None:
    """Let a piece of mapped memory take real pages, outside of Python's lock; any thread."""
    _libc.madvise(_address(memory, first), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)


def register(memory: mmap.mmap, first: int, num_bytes: int) -> None:
    """Let CUDA's copy engines reach a piece of mapped memory directly; any thread with a device.

    It takes a tenth of the time where the memory was filled. Raises `HostCopyError`.
    """
    size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
    error = call_driver("cuMemHostRegister_v2", _address(memory, first), size, flags)
    if error:
        raise HostCopyError(
            f"the CUDA driver cannot register {num_bytes >> 20} MiB of host memory ({error}): give "
            "less (--host-kv), or 0."
        )


def _address(memory: mmap.mmap, first: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, first)))


_libc = ctypes.CDLL(None)
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE. Older kernels refuse it; then registering fills the memory."""
_PORTABLE = 1
"""For all contexts of the process."""

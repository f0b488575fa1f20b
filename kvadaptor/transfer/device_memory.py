"""Device memory that outlives its process, by CUDA's virtual memory calls.

The memory has a file handle. Any process of the host that has it maps the same bytes, from another
device with peer access, too, whether or not the process that made them still runs.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvadaptor.transfer.driver import DriverError, call_driver
from kvadaptor.transfer.peers import PeerMappingError, tensor_at

_PINNED, _DEVICE, _FILE_HANDLE, _READ_WRITE = 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE,
CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR and CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_HAS_FILE_HANDLES = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("is_for_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def allocate_lasting(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return zeros, (num_bytes,) int8, and a file handle of their memory, which the caller closes.

    Raises `PeerMappingError` for a device that has no such memory, or too little of it.
    """
    area = LastingArea(num_bytes, device, piece_bytes=num_bytes)
    area.grow(num_bytes)
    area.raw.zero_()
    torch.cuda.synchronize(device)
    (file,) = area.files
    return area.raw, file


def map_lasting(file: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Map the memory of a file handle for a device, (num_bytes,) int8; closes the handle.

    The memory stays mapped until the process ends. Raises `PeerMappingError` if the device cannot
    reach it.
    """
    area = LastingArea(num_bytes, device, piece_bytes=num_bytes)
    area.map([file])
    return area.raw


class LastingArea:
    """A range of a device's addresses, filled with memory piece by piece.

    `raw` is all of it, (num_bytes,) int8; only what has been filled can be used. It stays mapped
    until the process ends.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, piece_bytes: int) -> None:
        """Reserve the addresses; raises `PeerMappingError` as all methods do."""
        self._device = device
        with _current(device) as number:
            if not _attribute(_HAS_FILE_HANDLES, number):
                raise PeerMappingError(f"CUDA device {number} has no memory with file handles.")
            wanted = _properties(number)
            self._piece, self._end = _whole(piece_bytes, wanted), _whole(num_bytes, wanted)
            address, nothing = ctypes.c_uint64(), ctypes.c_uint64(0)
            _call(
                *("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self._end)),
                *(ctypes.c_size_t(0), nothing, nothing),
            )
        self._address = address.value
        self._filled = 0
        self.files: list[int] = []
        """A file handle of each piece, which the caller closes."""
        self.raw = tensor_at(self._address, num_bytes, device)

    def grow(self, end: int) -> None:
        """Fill it with new memory up to this byte."""
        with _current(self._device) as number:
            while self._filled < end:
                handle, file = self._new_piece(number), ctypes.c_int(-1)
                kind, flags = ctypes.c_int(_FILE_HANDLE), ctypes.c_uint64(0)
                try:
                    _call("cuMemExportToShareableHandle", ctypes.byref(file), handle, kind, flags)
                    self._map(handle, number)
                except PeerMappingError:
                    if file.value >= 0:
                        os.close(file.value)
                    raise
                finally:
                    call_driver("cuMemRelease", handle)
                self.files.append(file.value)

    def map(self, files: Sequence[int]) -> None:
        """Fill it with the memory of these file handles, in order, and close them."""
        waiting = list(files)
        try:
            with _current(self._device) as number:
                while waiting:
                    handle, kind = ctypes.c_uint64(), ctypes.c_int(_FILE_HANDLE)
                    pointer = ctypes.c_void_p(waiting[0])
                    _call(
                        *("cuMemImportFromShareableHandle", ctypes.byref(handle)),
                        *(pointer, kind),
                    )
                    os.close(waiting.pop(0))
                    try:
                        self._map(handle, number)
                    finally:
                        call_driver("cuMemRelease", handle)
        finally:
            for file in waiting:
                os.close(file)
        if self._filled < self._end:
            raise PeerMappingError("some pieces of the memory are missing.")

    def unmap(self) -> None:
        """Give the addresses back, and the memory with them if nobody else has it."""
        torch.cuda.synchronize(self._device)
        with _current(self._device):
            address = ctypes.c_uint64(self._address)
            if self._filled:
                _call("cuMemUnmap", address, ctypes.c_size_t(self._filled))
            _call("cuMemAddressFree", address, ctypes.c_size_t(self._end))
        self._filled = 0

    @property
    def _next_bytes(self) -> int:
        return min(self._piece, self._end - self._filled)

    def _new_piece(self, number: int) -> ctypes.c_uint64:
        wanted, handle = _properties(number), ctypes.c_uint64()
        size, flags = ctypes.c_size_t(self._next_bytes), ctypes.c_uint64(0)
        torch.cuda.empty_cache()  # The driver has only what torch does not keep.
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(wanted), flags)
        return handle

    def _map(self, handle: ctypes.c_uint64, number: int) -> None:
        count = self._next_bytes
        at, size = ctypes.c_uint64(self._address + self._filled), ctypes.c_size_t(count)
        _call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(_Location(_DEVICE, number), _READ_WRITE)
        _call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._filled += count


def _whole(num_bytes: int, wanted: _Properties) -> int:
    """Return a size in whole pages of the device."""
    page, least = ctypes.c_size_t(), ctypes.c_int(0)
    _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(wanted), least)
    return int(-(-num_bytes // page.value) * page.value)


def _properties(number: int) -> _Properties:
    location = _Location(_DEVICE, number)
    return _Properties(type=_PINNED, handle_types=_FILE_HANDLE, location=location)


def _attribute(name: int, number: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(name), ctypes.c_int(number))
    return int(value.value)


@contextmanager
def _current(device: torch.device) -> Iterator[int]:
    """Make a device's context current in this thread; gives the driver's number of the device."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield torch.cuda.current_device()


def _call(name: str, *arguments: Any) -> None:
    try:
        error = call_driver(name, *arguments)
    except DriverError as failure:
        raise PeerMappingError(str(failure)) from failure
    if error:
        raise PeerMappingError(f"the CUDA driver's {name} failed ({error}).")

"""Device memory that outlives its process, by CUDA's virtual memory calls.

The memory has a file handle. Any process of the host that has it maps the same bytes, from another
device with peer access, too, whether or not the process that made them still runs.
"""

import ctypes
import os
from collections.abc import Iterator
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
    with _current(device) as number:
        if not _attribute(_HAS_FILE_HANDLES, number):
            raise PeerMappingError(f"CUDA device {number} has no memory with file handles.")
        torch.cuda.empty_cache()  # The driver has only what torch does not keep.
        wanted = _properties(number)
        size = _whole(num_bytes, wanted)
        handle, file = ctypes.c_uint64(), ctypes.c_int(-1)
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(wanted), ctypes.c_uint64(0))
        kind, flags = ctypes.c_int(_FILE_HANDLE), ctypes.c_uint64(0)
        try:
            _call("cuMemExportToShareableHandle", ctypes.byref(file), handle, kind, flags)
            address = _mapped(handle, size, number)
        except PeerMappingError:
            call_driver("cuMemRelease", handle)
            if file.value >= 0:
                os.close(file.value)
            raise
    raw = tensor_at(address, num_bytes, device)
    raw.zero_()
    torch.cuda.synchronize(device)
    return raw, file.value


def map_lasting(file: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Map the memory of a file handle for a device, (num_bytes,) int8; closes the handle.

    The memory stays mapped until the process ends. Raises `PeerMappingError` if the device cannot
    reach it.
    """
    with _current(device) as number:
        handle, kind = ctypes.c_uint64(), ctypes.c_int(_FILE_HANDLE)
        try:
            pointer = ctypes.c_void_p(file)
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), pointer, kind)
        finally:
            os.close(file)
        size = _whole(num_bytes, _properties(number))
        return tensor_at(_mapped(handle, size, number), num_bytes, device)


def _mapped(handle: ctypes.c_uint64, size: ctypes.c_size_t, number: int) -> int:
    """Map memory for a device; it lasts until it is unmapped and all its files are closed."""
    address, nothing = ctypes.c_uint64(), ctypes.c_uint64(0)
    _call(
        *("cuMemAddressReserve", ctypes.byref(address), size),
        *(ctypes.c_size_t(0), nothing, nothing),
    )
    _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, nothing)
    access = _Access(_Location(_DEVICE, number), _READ_WRITE)
    _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
    _call("cuMemRelease", handle)
    return address.value


def _whole(num_bytes: int, wanted: _Properties) -> ctypes.c_size_t:
    """Return a size in whole pages of the device."""
    page, least = ctypes.c_size_t(), ctypes.c_int(0)
    _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(wanted), least)
    return ctypes.c_size_t(-(-num_bytes // page.value) * page.value)


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

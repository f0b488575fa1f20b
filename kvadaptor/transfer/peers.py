"""KV memory that other processes of the host can read: allocate, export and map it.

For processes that start together, once, at start-up; CPU ranks of a cell use memory that exists
before them (`comm_pool.cpu.cell_memory`). On CPU the memory is an anonymous file (`memfd`) that
peers open through /proc, so nothing remains however a process ends. On CUDA it is one cudaMalloc
segment that peers map with CUDA IPC, through driver calls: torch's sharing counts references in
files under /dev/shm, which a killed process never removes.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kvadaptor.transfer.driver import call_driver

MEMORY_NAME = "aileron-kv"
"""The name of the memory in /proc/<pid>/maps."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAZY_PEER_ACCESS = 1
_IPC_HANDLE_BYTES = 64

T = TypeVar("T")


class PeerMappingError(RuntimeError):
    """Peers cannot map each other's memory; one sentence with the cause and a remedy."""


@dataclass(frozen=True, slots=True)
class CpuHandle:
    """Memory of a process on a host; `name` verifies that `fd` of `pid` still is that memory."""

    host: str
    pid: int
    fd: int
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """Memory on a device: `num_bytes` at `offset` of the allocation that `ipc` (64 bytes) names."""

    host: str
    device_uuid: str
    ipc: bytes
    offset: int
    num_bytes: int


Handle = CpuHandle | CudaHandle
"""Small and picklable; valid while the process that exported it keeps its tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerMap:
    """KV memory by rank in the group, own memory included; or a reason, the same on all ranks."""

    memory: Mapping[int, torch.Tensor]
    refusal: str | None


# -------------------------------------------------------------------------- allocation

_shared: dict[int, tuple[int, str]] = {}
"""Address of each shared CPU tensor -> its file descriptor and name."""


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeros, (num_bytes,) int8, that `export_handle` can export; `ValueError` if empty.

    On CPU the tensor is page-aligned and takes no memory until it is touched. On CUDA it lies in
    its own segment, unless PyTorch's allocator uses expandable segments, which cannot be exported.
    """
    if num_bytes < 1:
        raise ValueError(f"memory has at least one byte, not {num_bytes}.")
    if device.type == "cpu":
        return _allocate_file(num_bytes)
    # A large enough cached block would be split, and peers would map its other part too.
    torch.cuda.empty_cache()
    return torch.zeros(num_bytes, dtype=torch.int8, device=device)


def _allocate_file(num_bytes: int) -> torch.Tensor:
    name = f"{MEMORY_NAME}-{secrets.token_hex(8)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        # Shrinking a file would kill its readers.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)
    except BaseException:
        os.close(fd)
        raise
    raw = torch.frombuffer(mapping, dtype=torch.int8)
    _shared[raw.data_ptr()] = (fd, name)
    # The tensor holds the mapping: both end together.
    weakref.finalize(mapping, _forget, raw.data_ptr())
    return raw


def _forget(address: int) -> None:
    fd, _ = _shared.pop(address)
    os.close(fd)


# -------------------------------------------------------------------------- one peer


def export_handle(raw: torch.Tensor) -> Handle:
    """Return what peers need to map `raw`, a contiguous int8 tensor.

    Raises `PeerMappingError` if it cannot be exported. The tensor must stay alive, and its process
    should, while peers use it.
    """
    num_bytes = raw.numel()
    if raw.device.type == "cuda":
        with torch.cuda.device(raw.device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            ipc, offset = _export_address(raw.data_ptr())
        uuid = str(torch.cuda.get_device_properties(raw.device).uuid)
        return CudaHandle(_host(), uuid, ipc, offset, num_bytes)
    if raw.data_ptr() not in _shared:
        raise PeerMappingError("this CPU memory is private to its process: use peers.allocate.")
    fd, name = _shared[raw.data_ptr()]
    return CpuHandle(_host(), os.getpid(), fd, name, num_bytes)


def open_peer(handle: Handle, device: torch.device) -> torch.Tensor:
    """Map a peer's memory for `device` and return it, (num_bytes,) int8, read-only by contract.

    On CPU it stays readable after the peer has ended; on CUDA its content is then undefined. Not
    for memory of this process. Raises `PeerMappingError` if the peer is on another host, its device
    out of reach, its process gone or another user's.
    """
    if handle.host != _host():
        raise PeerMappingError("the peer is on another host, whose memory cannot be mapped.")
    if device.type != ("cpu" if isinstance(handle, CpuHandle) else "cuda"):
        raise PeerMappingError(f"the peer's memory is of another kind than {device}.")
    if isinstance(handle, CpuHandle):
        return _open_file(handle)
    _check_reach(handle, device)
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        address = _open_address(handle.ipc) + handle.offset
    return tensor_at(address, handle.num_bytes, device)


def _open_file(handle: CpuHandle) -> torch.Tensor:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerMappingError(
            f"{path} cannot be opened ({error.strerror}): either that process has ended, or ranks "
            "do not share one user, one PID namespace and a /proc that shows them each other."
        ) from error
    try:
        # In another PID namespace the pid may belong to another process.
        if handle.name not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise PeerMappingError(
                f"{path} is not the peer's memory: ranks must share one PID namespace."
            )
        mapping = mmap.mmap(fd, handle.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise PeerMappingError(f"the memory at {path} cannot be mapped: {error}.") from error
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is read-only, which is the point
        return torch.frombuffer(mapping, dtype=torch.int8)


def _host() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


# -------------------------------------------------------------------------- CUDA


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _IPC_HANDLE_BYTES),)


def _export_address(address: int) -> tuple[bytes, int]:
    """Return the IPC handle of the allocation that holds the address, and the offset in it."""
    base, size, ipc = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    pointer = ctypes.c_uint64(address)
    error = call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
    error = error or call_driver("cuIpcGetMemHandle", ctypes.byref(ipc), base)
    if error:
        raise PeerMappingError(
            f"the CUDA driver cannot share this KV memory ({error}): it must come from cudaMalloc, "
            "so remove expandable_segments:True and backend:cudaMallocAsync from "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF."
        )
    return bytes(ipc), address - base.value


def _open_address(ipc: bytes) -> int:
    """Map the allocation for the current device, and return its address."""
    pointer = ctypes.c_uint64()
    by_value = _IpcHandle.from_buffer_copy(ipc)
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    error = call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), by_value, flags)
    if error:
        raise PeerMappingError(
            f"the CUDA driver cannot map a peer's KV memory ({error}): the devices need "
            "peer-to-peer access and ranks one IPC namespace."
        )
    return pointer.value


def _check_reach(handle: CudaHandle, device: torch.device) -> None:
    """Refuse devices without peer access; only the driver knows of invisible devices."""
    own = device.index if device.index is not None else torch.cuda.current_device()
    for peer in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(peer).uuid) != handle.device_uuid:
            continue
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise PeerMappingError(
                f"CUDA devices {own} and {peer} have no peer-to-peer access: `nvidia-smi topo -p2p "
                "r` shows which have."
            )


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor over memory outside of torch; it stays mapped until the process ends."""
    # Not through __cuda_array_interface__: torch might copy the memory to another device.
    storage = torch._C._construct_storage_from_data_pointer(  # noqa: SLF001 -- no public way
        address, device, num_bytes
    )
    return torch.empty(0, dtype=torch.int8, device=device).set_(storage, 0, (num_bytes,), (1,))


# -------------------------------------------------------------------------- all peers


def map_peers(raw: torch.Tensor, cpu_group: Any) -> PeerMap:
    """Map the memory of all ranks of a Gloo group to each other; collective, once at start-up.

    Either every rank gets all memory, or every rank gets the same refusal.
    """
    own = dist.get_rank(cpu_group)
    offers = gather_all(attempt(lambda: export_handle(raw)), cpu_group)
    refusal = refusal_of(offers)
    if refusal is not None:
        return PeerMap({}, refusal)
    memory: dict[int, torch.Tensor] = {own: raw}
    reason = attempt(
        lambda: memory.update(
            (rank, open_peer(handle, raw.device)) for rank, handle in offers.items() if rank != own
        )
    )
    # Also keeps a rank from ending before the others have opened its memory.
    refusal = refusal_of(gather_all(reason, cpu_group))
    return PeerMap({}, refusal) if refusal is not None else PeerMap(memory, None)


def attempt(action: Callable[[], T]) -> T | PeerMappingError:
    """Return an action's result or failure: a rank that raised would keep others waiting."""
    try:
        return action()
    except PeerMappingError as error:
        return error
    except (OSError, RuntimeError, AttributeError) as error:
        return PeerMappingError(f"{type(error).__name__}: {error}")


def gather_all(own: Any, cpu_group: Any) -> dict[int, Any]:
    """Return the value that each rank of a Gloo group gives, by its place; a collective."""
    everyone: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(everyone, own, group=cpu_group)
    return dict(enumerate(everyone))


def refusal_of(answers: Mapping[int, Any]) -> str | None:
    """Return the reason of the lowest rank that failed; all ranks get the same one."""
    for rank, answer in answers.items():
        if isinstance(answer, PeerMappingError):
            return f"rank {rank}: {answer}"
    return None

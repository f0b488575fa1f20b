"""The hardware of this machine, detected without torch."""

import functools
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

NVIDIA_SMI_LIMIT_S = 20
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_names() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that nvidia-smi lists; empty if there are none."""
    return tuple(name for name, _ in _gpus())


def gpu_memory_bytes() -> int:
    """Return the memory of the smallest GPU; 0 if it is not known."""
    return min((size for _, size in _gpus() if size), default=0)


def host_memory_bytes() -> int:
    """Return the memory that this machine or container may use."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            size = min(size, int(limit.read_text()))
    return size


@functools.cache
def _gpus() -> tuple[tuple[str, int], ...]:
    """Return the name and the bytes of each GPU; nvidia-smi may take a second."""
    return read_gpus(nvidia_smi_lines("--query-gpu=name,memory.total"))


def nvidia_smi_lines(query: str) -> str:
    """Return the lines that nvidia-smi answers a query with; empty if it cannot be asked."""
    if not _DRIVER.exists() and shutil.which("nvidia-smi") is None:
        return ""
    try:
        listing = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return listing.stdout


def read_gpus(listing: str) -> tuple[tuple[str, int], ...]:
    """Read nvidia-smi's lines `name, MiB`; an unknown size, as on unified memory, is 0."""
    rows = (line.rpartition(",") for line in listing.splitlines() if line.strip())
    return tuple(
        (name.strip(), int(size) * 2**20 if size.strip().isdigit() else 0) for name, _, size in rows
    )

"""The hardware of this machine, detected without torch."""

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
    return _query_gpus("name")


def gpu_memory_bytes() -> int:
    """Return the memory of the smallest GPU; 0 if it is not known."""
    sizes = [int(size) for size in _query_gpus("memory.total", "nounits") if size.isdigit()]
    return min(sizes, default=0) * 2**20


def host_memory_bytes() -> int:
    """Return the memory that this machine or container may use."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            size = min(size, int(limit.read_text()))
    return size


def _query_gpus(field: str, *forms: str) -> tuple[str, ...]:
    if not _DRIVER.exists() and shutil.which("nvidia-smi") is None:
        return ()
    try:
        listing = subprocess.run(
            [
                "nvidia-smi",
                f"--query-gpu={field}",
                f"--format={','.join(('csv', 'noheader', *forms))}",
            ],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())

"""The hardware of this machine, detected without torch."""

import shutil
import subprocess
from pathlib import Path

NVIDIA_SMI_LIMIT_S = 20
_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_names() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that nvidia-smi lists; empty if there are none."""
    if not _DRIVER.exists() and shutil.which("nvidia-smi") is None:
        return ()
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())

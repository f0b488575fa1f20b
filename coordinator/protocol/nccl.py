"""Which NCCL ranks on CUDA load, and whether it lets them share a device."""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from coordinator.protocol.config import Config, ConfigError

DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SHARING = (2, 30)
"""The first version whose ranks may share a device; older ones fail with `Duplicate GPU`."""


def nccl_version() -> str | None:
    """Return the version of the installed NCCL; None without one, as on CPU."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def can_share(found: str) -> bool:
    """Return whether ranks may share a device with this version of NCCL."""
    major, minor, *_ = (*map(int, found.split(".")[:2]), 0)
    return (major, minor) >= SHARING


def check_nccl(
    config: Config, found: str | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Refuse ranks that share a device with an NCCL that cannot; raises `ConfigError`.

    A library that the user preloads is not judged.
    """
    cell = config.cell
    if cell.device != "cuda" or cell.ranks_per_device == 1:
        return
    found = found or nccl_version()
    is_preloaded = "nccl" in environment.get("LD_PRELOAD", "") or environment.get(
        "VLLM_NCCL_SO_PATH"
    )
    if found is not None and not can_share(found) and not is_preloaded:
        raise ConfigError(
            f"cell.ranks_per_device is {cell.ranks_per_device}, but NCCL {found} is installed, and "
            "ranks can share a device from NCCL 2.30 on: run `make setup DEVICE=cuda`, or leave "
            "out --ranks-per-device."
        )

"""How much memory of this machine, or of its container, the cell's host pages take."""

from pathlib import Path

import psutil

from coordinator.protocol.config import Config, ConfigError
from coordinator.protocol.cores import CGROUPS, OWN_CGROUP, own_cgroups

GIB = 2**30
DEFAULT_SHARE = 0.1
"""Part of the machine's memory that the host pages of a cell with GPUs take by default."""

KEEP_SHARE = 0.1
"""Part of the free memory that stays free, for what processes take later."""


def free_memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the memory that is free on the machine, or in the cgroup that has least left."""
    rooms = [psutil.virtual_memory().available]
    for folder in own_cgroups(cgroups, own):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                most, now = (int((folder / name).read_text()) for name in (limit, used))
            except (OSError, ValueError):
                continue  # There is no such file, or it says `max`.
            rooms.append(max(0, most - now))
    return min(rooms)


def with_host_kv(
    config: Config, free_bytes: int | None = None, total_bytes: int | None = None
) -> Config:
    """Return a config that names the size of the cell's host pages.

    Raises `ConfigError` if they would take more than what is free.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    room_gib = free * (1 - KEEP_SHARE) / GIB
    wanted_gib = config.cell.host_kv_gib
    if wanted_gib is None:
        total = psutil.virtual_memory().total if total_bytes is None else total_bytes
        is_default = config.cell.device == "cuda"
        wanted_gib = min(total / GIB * DEFAULT_SHARE, room_gib) if is_default else 0.0
    elif wanted_gib > room_gib:
        raise ConfigError(
            f"cell.host_kv_gib is {wanted_gib:g}, and of this machine's memory, or of "
            f"its cgroup's, {free / GIB:.1f} GiB are free: use at most {room_gib:.1f} "
            "(--host-kv)."
        )
    cell = config.cell.model_copy(update={"host_kv_gib": wanted_gib})
    return config.model_copy(update={"cell": cell})

"""Whether this machine, or its container, has the memory that the cell's host pages may take."""

from pathlib import Path

import psutil

from coordinator.protocol.config import Config, ConfigError
from coordinator.protocol.cores import CGROUPS, OWN_CGROUP, own_cgroups

GIB = 2**30
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


def check_host_kv(config: Config, free_bytes: int | None = None) -> None:
    """Raise `ConfigError` if the host pages would take more than what is free."""
    wanted = config.cell.host_kv_gib * GIB
    if not wanted:
        return
    free = free_memory_bytes() if free_bytes is None else free_bytes
    room = free * (1 - KEEP_SHARE)
    if wanted > room:
        raise ConfigError(
            f"cell.host_kv_gib is {config.cell.host_kv_gib:g}, and of this machine's memory, or of "
            f"its cgroup's, {free / GIB:.1f} GiB are free: use at most {room / GIB:.1f} "
            "(--host-kv)."
        )

"""How much memory of this machine, or of its container, the cell's host pages take."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from coordinator.protocol.config import Config, ConfigError
from coordinator.protocol.cores import CGROUPS, OWN_CGROUP, own_cgroups

GIB = 2**30
KEEP_SHARE = 0.1
"""Part of the free memory that stays free, for what processes take later."""
AUTO_SHARE = 0.1
"""Part of all memory that `auto` gives host pages."""
AUTO_MIN_BYTES = GIB
"""Where `auto` would give less, it gives none."""


def free_memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the memory that is free on the machine, or in the cgroup that has least left."""
    rooms = (max(0, most - now) for most, now in _limits(cgroups, own))
    return min([int(psutil.virtual_memory().available), *rooms])


def memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the memory of the machine, or what the tightest cgroup allows."""
    return min([int(psutil.virtual_memory().total), *(most for most, _ in _limits(cgroups, own))])


def _limits(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each cgroup that has a limit, in bytes."""
    for folder in own_cgroups(cgroups, own):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                most, now = (int((folder / name).read_text()) for name in (limit, used))
            except (OSError, ValueError):
                continue  # There is no such file, or it says `max`.
            # What files fill is free for processes, such as weights that were read.
            yield most, max(0, now - _cached(folder, cache))


def _cached(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def with_host_kv(
    config: Config, *, has_hashes: bool, all_bytes: int | None = None, free_bytes: int | None = None
) -> Config:
    """Return the configuration with a number in place of `auto`.

    `has_hashes`: the engine has a prefix cache, by whose hashes pages are found.
    """
    if config.cell.host_kv_gib != "auto":
        return config
    wanted = 0.0
    if config.cell.device == "cuda" and has_hashes:
        whole = memory_bytes() if all_bytes is None else all_bytes
        free = free_memory_bytes() if free_bytes is None else free_bytes
        wanted = min(whole * AUTO_SHARE, free * (1 - KEEP_SHARE))
    gib = wanted / GIB if wanted >= AUTO_MIN_BYTES else 0.0
    cell = config.cell.model_copy(update={"host_kv_gib": gib})
    return config.model_copy(update={"cell": cell})


def check_host_kv(config: Config, free_bytes: int | None = None) -> None:
    """Raise `ConfigError` if the host pages would take more than what is free."""
    gib = config.cell.host_kv_gib
    if gib == "auto" or not gib:
        return
    wanted = gib * GIB
    free = free_memory_bytes() if free_bytes is None else free_bytes
    room = free * (1 - KEEP_SHARE)
    if wanted > room:
        raise ConfigError(
            f"cell.host_kv_gib is {gib:g}, and of this machine's memory, or of "
            f"its cgroup's, {free / GIB:.1f} GiB are free: use at most {room / GIB:.1f} "
            "(--host-kv)."
        )

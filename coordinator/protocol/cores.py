"""The number of cores that this process may use; a container may have fewer than the machine."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the cores of this process's affinity, or the quota of its cgroups if that is lower.

    A quota of 2.5 cores counts as 2. The result is at least 1.
    """
    quotas = _quotas(cgroups, own)
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def own_cgroups(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[Path]:
    """Return the folders of this process's cgroup and of all its ancestors.

    The last ones are those of cgroup v1, which keeps the files of each resource in a folder of its
    own; a container sees its cgroup as the root.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    name = next((line[3:] for line in lines if line.startswith("0::/")), "/")
    found = _up_to(cgroups, name)
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        for each in {"cpu", "memory"}.intersection(controllers.split(",")):
            found += _up_to(cgroups / each, name)
    return list(dict.fromkeys([*found, cgroups / "cpu", cgroups / "memory"]))


def _up_to(root: Path, name: str) -> list[Path]:
    """Return the folder of a cgroup and those of its ancestors."""
    folder = root / name.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def _quotas(cgroups: Path, own: Path) -> list[float]:
    """The quotas, in cores, of this process's cgroup and of all its ancestors."""
    found: list[float | None] = []
    for each in own_cgroups(cgroups, own):
        found.append(_quota(each / "cpu.max"))
        found.append(_quota(each / "cpu.cfs_quota_us", each / "cpu.cfs_period_us"))
    return [quota for quota in found if quota is not None]


def _quota(*files: Path) -> float | None:
    """Processor time per period, both read in microseconds; None if there is no quota."""
    try:
        time_us, period_us = " ".join(file.read_text() for file in files).split()
        quota = int(time_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return quota if quota > 0 else None

"""Cores that a process may use, by its affinity and the quotas of its cgroups."""

import os
from pathlib import Path

import pytest

from coordinator.protocol.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has more; this process may use eight of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"pod/cpu.max": "300000 100000\n"}, 3),
        ({"pod/one/cpu.max": "300000 100000\n", "pod/cpu.max": "200000 100000\n"}, 2),
        ({"other/cpu.max": "100000 100000\n"}, 8),
        ({"cpu.max": "nonsense\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 5),
    ],
)
def test_the_lowest_quota_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    own = tmp_path / "own"
    own.write_text("1:cpu:/elsewhere\n0::/pod/one\n")
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_cores(tmp_path / "cgroup", own) == cores


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cgroup", tmp_path / "own") == 8

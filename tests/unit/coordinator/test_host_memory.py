"""Host pages that this machine has no memory for are refused before anything starts."""

from pathlib import Path

import psutil
import pytest

from coordinator.protocol.config import Config, ConfigError, check_config
from coordinator.protocol.host_memory import GIB, free_memory_bytes, with_host_kv


def config(host_kv_gib: float | None, device: str = "cpu") -> Config:
    return check_config(
        {"model": {"path": "m"}, "cell": {"host_kv_gib": host_kv_gib, "device": device}}
    )


def size_gib(wanted: float | None, device: str, free: int, total: int = 100) -> float | None:
    found = with_host_kv(config(wanted, device), free * GIB, total * GIB)
    return found.cell.host_kv_gib


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    assert size_gib(0, "cpu", 0) == 0
    assert size_gib(9, "cuda", 10) == 9
    with pytest.raises(ConfigError, match=r"10\.0 GiB are free: use at most 9\.0 \(--host-kv\)"):
        size_gib(9.1, "cpu", 10)


def test_gpus_have_a_tenth_of_the_machine_by_default() -> None:
    assert size_gib(None, "cpu", 50) == 0
    assert size_gib(None, "cuda", 50) == 10
    assert size_gib(None, "cuda", 10) == 9, "no more than what is free"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"pod/memory.max": "900", "pod/memory.current": "850"}, 50),
        ({"pod/memory.max": "10", "pod/memory.current": "11"}, 0),
        ({"memory/memory.limit_in_bytes": "70", "memory/memory.usage_in_bytes": "7"}, 63),
        ({"pod/one/memory.max": "9999", "memory.max": "20", "memory.current": "1"}, 19),
    ],
)
def test_a_cgroup_limits_what_is_free(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/one\n")
    cgroups = tmp_path / "cgroups"
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    found = free_memory_bytes(cgroups, own)
    if left is None:
        assert found == pytest.approx(psutil.virtual_memory().available, rel=0.3)
    else:
        assert found == left

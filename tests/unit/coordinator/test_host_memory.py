"""Host pages that this machine has no memory for are refused before anything starts."""

from pathlib import Path

import psutil
import pytest

from coordinator.protocol.config import Config, ConfigError, check_config
from coordinator.protocol.host_memory import (
    GIB,
    check_host_kv,
    free_memory_bytes,
    memory_bytes,
    with_host_kv,
)


def config(host_kv_gib: float | str, device: str = "cuda") -> Config:
    cell = {"host_kv_gib": host_kv_gib, "device": device}
    return check_config({"model": {"path": "m"}, "cell": cell})


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    check_host_kv(config(0), 0)
    check_host_kv(config(9), 10 * GIB)
    with pytest.raises(ConfigError, match=r"10\.0 GiB are free: use at most 9\.0 \(--host-kv\)"):
        check_host_kv(config(9.1), 10 * GIB)


def auto_gib(
    whole: float, free: float, *, device: str = "cuda", has_hashes: bool = True
) -> float | str:
    made = with_host_kv(
        check_config({"model": {"path": "m"}, "cell": {"device": device}}),
        has_hashes=has_hashes,
        all_bytes=int(whole * GIB),
        free_bytes=int(free * GIB),
    )
    return made.cell.host_kv_gib


def test_by_default_gpus_get_a_tenth_of_all_memory() -> None:
    assert auto_gib(256, 250) == pytest.approx(25.6)
    assert auto_gib(256, 20) == pytest.approx(18), "not more than what is free"
    assert auto_gib(9, 9) == 0, "less than 1 GiB is not worth it"
    assert auto_gib(256, 250, device="cpu") == 0
    assert auto_gib(256, 250, has_hashes=False) == 0


def test_a_number_stays_as_it_is() -> None:
    for gib in (0, 3.5):
        assert with_host_kv(config(gib), has_hashes=True).cell.host_kv_gib == gib
    check_host_kv(config("auto"), 0)


def test_a_cgroup_limits_what_a_tenth_is_of(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pod\n")
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "memory.max").write_text("7000")
    (tmp_path / "pod" / "memory.current").write_text("6000")
    assert memory_bytes(tmp_path, tmp_path / "own") == 7_000
    (tmp_path / "pod" / "memory.max").write_text("max")
    assert memory_bytes(tmp_path, tmp_path / "own") == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"pod/memory.max": "900", "pod/memory.current": "850"}, 50),
        ({"pod/memory.max": "10", "pod/memory.current": "11"}, 0),
        ({"memory/memory.limit_in_bytes": "70", "memory/memory.usage_in_bytes": "7"}, 63),
        ({"pod/one/memory.max": "9999", "memory.max": "20", "memory.current": "1"}, 19),
        (
            {
                "pod/memory.max": "900",
                "pod/memory.current": "850",
                "pod/memory.stat": "anon 50\ninactive_file 800\n",
            },
            850,
        ),
        (
            {
                "memory/old/memory.limit_in_bytes": "70",
                "memory/old/memory.usage_in_bytes": "7",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "8",
            },
            63,
        ),
    ],
)
def test_a_cgroup_limits_what_is_free(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory,cpu:/old\n0::/pod/one\n")
    cgroups = tmp_path / "cgroups"
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    found = free_memory_bytes(cgroups, own)
    if left is None:
        assert found == pytest.approx(psutil.virtual_memory().available, rel=0.3)
    else:
        assert found == left

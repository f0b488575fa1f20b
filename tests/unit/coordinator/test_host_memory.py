"""Host pages that this machine has no memory for are refused before anything starts."""

from pathlib import Path

import psutil
import pytest

from coordinator.protocol.config import Config, ConfigError, check_config
from coordinator.protocol.host_memory import GIB, check_host_kv, free_memory_bytes


def config(host_kv_gib: float) -> Config:
    return check_config({"model": {"path": "m"}, "cell": {"host_kv_gib": host_kv_gib}})


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    check_host_kv(config(0), 0)
    check_host_kv(config(9), 10 * GIB)
    with pytest.raises(ConfigError, match=r"10\.0 GiB are free: use at most 9\.0 \(--host-kv\)"):
        check_host_kv(config(9.1), 10 * GIB)


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

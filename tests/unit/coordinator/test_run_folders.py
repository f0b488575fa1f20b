"""Folders and files of the configuration that cannot be used, and one folder for two cells."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.cli import main
from coordinator.cli import up as up_command
from coordinator.cli.children import _Log
from coordinator.cli.errors import CliError
from coordinator.cli.run_lock import LOCK_NAME, lock_folder, release_folder
from coordinator.protocol import folders
from worker.demo import MODEL_DIR

MODEL: dict[str, Any] = {"path": str(MODEL_DIR)}


def config_file(folder: Path, **sections: Any) -> Path:
    file = folder / "cell.yaml"
    file.write_text(yaml.safe_dump({"model": MODEL, **sections}))
    return file


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: object) -> None:
        raise AssertionError("a process would have been started.")

    monkeypatch.setattr(up_command, "_serve", serve)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Folders of tests may have longer names than any socket may have.
    monkeypatch.setattr(folders, "UNIX_PATH_BYTES_MAX", 300)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"run_dir": "/proc/x"}, "run_dir /proc/x cannot be written (No such file or directory)"),
        ({"run_dir": "/etc/passwd"}, "run_dir /etc/passwd is a file: name a folder."),
        ({"run_dir": "/etc/passwd/x"}, "run_dir /etc/passwd/x cannot be written (Not a directory)"),
        ({"run_dir": "/tmp/" + "a" * 250 + "/" + "a" * 20}, "too long for its Unix sockets"),
        (
            {"batches": {"data_dir": "/proc/nope"}},
            "batches.data_dir /proc/nope cannot be written (No such file or directory): name a",
        ),
        (
            {"policy": {"name": "adaptive", "observation_log": "/proc/nope/log"}},
            "policy.observation_log /proc/nope/log cannot be written (No such file or directory)",
        ),
        (
            {"policy": {"name": "adaptive", "step_times": "/proc/nope/times"}},
            "policy.step_times: cannot read /proc/nope/times: No such file or directory.",
        ),
        ({"gateway": {"keys_file": "/proc/nope"}}, "cannot read the keys in /proc/nope"),
        (
            {"gateway": {"tls_cert_file": "/proc/a", "tls_key_file": "/proc/b"}},
            "gateway: cannot read /proc/a: No such file or directory.",
        ),
        ({"batches": {"storage_file": "/proc/nope"}}, "/proc/nope"),
        ({"admin": {"host": "0.0.0.0"}}, "set AILERON_ADMIN_KEY to a secret"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    sentence: str,
) -> None:
    assert main(["up", "--config", str(config_file(tmp_path, **sections))]) == 2
    said = capsys.readouterr().err
    assert sentence in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize("process", ["gateway", "coordinator"])
def test_processes_alone_refuse_them_too(tmp_path: Path, process: str) -> None:
    policy = {"name": "adaptive", "observation_log": "/proc/nope/log"}
    sections = {"batches": {"data_dir": "/proc/nope"}, "policy": policy}
    file = config_file(tmp_path, **sections)
    command = [sys.executable, "-m", process, "--config", str(file)]
    env = {"PATH": "/usr/bin:/bin", "AILERON_TOKEN": "x" * 32, "HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "cannot be written (No such file or directory)" in done.stderr.splitlines()[-1]


def test_no_folder_of_the_user_leaves_batches_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nope")

    async def serve(config: Any, *_: object) -> tuple[str, bool]:
        assert config.batches.data_dir == ""
        return "", False

    monkeypatch.setattr(up_command, "_serve", serve)
    assert main(["up", "--config", str(config_file(tmp_path)), "--port", "0"]) == 0
    said = capsys.readouterr().err
    assert "/proc/nope/aileron cannot be written" in said
    assert "batches of the API are off" in said


def test_no_temporary_folder_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere(**_: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    assert main(["up"]) == 1
    assert "name one with TMPDIR" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_of_a_running_cell_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from coordinator.cli.run_lock import lock_folder\n"
            f"lock = lock_folder(Path({str(run_dir)!r}), 'first')\n"
            "print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (run_dir / "config.yaml").write_text("of the first")
        file = config_file(tmp_path, run_dir=str(run_dir))
        assert main(["up", "--config", str(file), "--port", "0", "--admin-port", "0"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"run_dir {run_dir} is in use by first (pid {holder.pid})" in said
        assert (run_dir / "config.yaml").read_text() == "of the first"
    finally:
        holder.kill()
        holder.communicate()
    # A killed process leaves the file and no lock.
    lock_folder(run_dir, "second").close()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_lock_without_words_is_still_a_lock(tmp_path: Path, text: str) -> None:
    with lock_folder(tmp_path, "first"):
        (tmp_path / LOCK_NAME).write_text(text)
        with pytest.raises(CliError, match="in use by another cell: stop that one"):
            lock_folder(tmp_path, "second")


def test_a_log_on_a_full_disk_does_not_end_the_reading_of_a_child(tmp_path: Path) -> None:
    (tmp_path / "worker.log").symlink_to("/dev/full")
    with _Log(tmp_path / "worker.log") as log:
        log.write(b"a line")


def test_the_room_for_sockets_is_that_of_a_gateway() -> None:
    longest = len("/gateway-abcdefgh/engine-out.sock")
    assert longest <= folders.SOCKET_PATH_BYTES


def test_an_ended_run_leaves_no_lock(tmp_path: Path) -> None:
    release_folder(lock_folder(tmp_path, "first"))
    assert list(tmp_path.iterdir()) == []

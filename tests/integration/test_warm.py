"""Who forks processes for the tests can end; whom it has forked runs on, and so do the tests."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cells import warm

WORDS = ["0", "--bind", "127.0.0.1"]


@contextlib.contextmanager
def waiting(setting: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits for requests, in an environment of its own."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "AILERON_SETTING": setting}
    process = warm.start_module(
        "nothing", "http.server", WORDS, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        with process.stdout as said:
            assert any(line.startswith(b"Serving") for line in said)
            yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not warm.is_wanted(), reason="every process starts from nothing")
def test_every_environment_is_forked_for_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "SERVERS_MAX", 1)
    monkeypatch.setattr(warm, "_servers", {})
    with waiting("one") as first:
        (server,) = warm._servers.values()
        with waiting("two") as second:
            assert server.process is not None and server.process.returncode == 0
            assert len(warm._servers) == 1
            for process in (first, second):
                assert isinstance(process, warm.WarmProcess)
                assert process.poll() is None
                assert b"-m http.server 0" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    (last,) = warm._servers.values()
    last.close()
    assert last.process is not None and last.process.returncode == 0

"""Starts processes of ours that import vLLM in milliseconds instead of ten seconds.

One process per kind and environment imports, and forks the others. They are children like those of
`subprocess`, and run the same modules: what is left out is the import alone, which the tests of
`aileron up` itself make. AILERON_TESTS_COLD=1 starts every process from nothing.
"""

import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.harness.cells.warm_server import MESSAGE_BYTES_MAX

ROOT = Path(__file__).resolve().parents[3]
START_LIMIT_S = 120.0
"""How long the imports may take."""
SERVERS_MAX = 6
"""How many are kept; the one that was asked last the longest ago ends for the next."""

_READ_AT_IMPORT = (
    *("AILERON_", "CUDA", "GLOO", "HF_", "KMP_", "LD_", "MKL_", "NCCL", "OMP_", "PYTHON"),
    *("TOKENIZERS", "TORCH", "TRANSFORMERS", "TRITON", "VLLM_"),
)
_TOLD_LATER = ("AILERON_TOKEN", "AILERON_TEST_")
_SET_BY_IMPORTS = (
    *("LD_LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"),
    "TRITON_CACHE_AUTOTUNING",
)
"""Here too, once a test has imported vLLM; those who are forked have imported it as well."""
PR_SET_CHILD_SUBREAPER = 36


class WarmProcess(subprocess.Popen[bytes]):
    """A child that another process has forked."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        # As `Popen` leaves itself behind a fork of its own; its other methods need no more.
        self.args = list(args)
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        own: Any = self
        own._child_created = True
        own._waitpid_lock = threading.Lock()
        own._sigint_wait_secs = 0.25
        own._input = None
        own._communication_started = False
        own.text_mode = False


class Server:
    """Asks a process that has imported what others need to fork them, as children of this one."""

    def __init__(self, asked: socket.socket) -> None:
        self._lock = threading.Lock()
        self._socket = asked
        self._socket.settimeout(START_LIMIT_S)
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of_kind(cls, kind: str, env: Mapping[str, str]) -> "Server":
        """Start one for a kind, in one environment as far as it matters to imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = cls(ours)
        with theirs:
            command = ["-m", "tests.harness.cells.warm_server", kind, str(theirs.fileno())]
            made.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        assert ours.recv(32) == b"ready", f"what {kind} imports cannot be imported"
        return made

    def close(self) -> None:
        """End it; whom it has forked lives on."""
        self._socket.close()
        if self.process is not None:
            self.process.wait(START_LIMIT_S)

    def start(self, message: bytes, descriptors: Sequence[int]) -> int:
        """Return the pid of a new child."""
        with self._lock:
            _reap(orphans=True)
            try:
                socket.send_fds(self._socket, [message], descriptors)
                return int(self._socket.recv(32))
            finally:
                _reap(orphans=False)


def _reap(*, orphans: bool) -> None:
    """Be the parent of processes below this one whose parent ends, or do not."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


_servers: dict[tuple[str, frozenset[tuple[str, str]]], Server] = {}
"""By kind and environment; last the one that was asked last."""
_servers_lock = threading.Lock()
"""Held until a server has forked, so that nobody else ends it meanwhile."""


@functools.cache
def is_wanted() -> bool:
    """Whether processes are forked at all."""
    return not os.environ.get("AILERON_TESTS_COLD")


def _server(kind: str, env: Mapping[str, str]) -> Server:
    read = {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_IMPORT)
        and not name.startswith((*_TOLD_LATER, *_SET_BY_IMPORTS))
    }
    key = kind, frozenset(read.items())
    found = _servers.pop(key, None)
    if found is None:
        if len(_servers) >= SERVERS_MAX:
            _servers.pop(next(iter(_servers))).close()
        found = Server.of_kind(kind, env)
    _servers[key] = found
    return found


def start_module(
    kind: str | None,
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    """Run `python -m MODULE ARGUMENTS` at the repository's root.

    `kind` is what it imports (`warm_server.IMPORTS`); with None it is started from nothing.
    `stdout` and `stderr` are as for `Popen`; both may be one file. PIPE is for stdout alone.
    """
    if kind is None or not is_wanted():
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=dict(env), stdout=stdout, stderr=stderr)
    with _servers_lock:
        server = _server(kind, env)
        return fork_module(server, module, arguments, env=env, stdout=stdout, stderr=stderr)


def fork_module(
    server: Server,
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    dies_with_parent: bool = False,
) -> WarmProcess:
    """Let this server do it."""
    request = {
        "module": module,
        "arguments": list(arguments),
        "cwd": str(ROOT),
        "env": dict(env),
        "dies_with_parent": dies_with_parent,
    }
    message = json.dumps(request).encode()
    assert len(message) <= MESSAGE_BYTES_MAX, "the environment is too large"
    command = [sys.executable, "-m", module, *arguments]
    if stdout != subprocess.PIPE:
        out = _number(stdout, 1)
        return WarmProcess(server.start(message, [out, _number(stderr, out)]), command)
    read, write = os.pipe()
    try:
        process = WarmProcess(server.start(message, [write, _number(stderr, write)]), command)
    finally:
        os.close(write)
    process.stdout = os.fdopen(read, "rb")
    return process


def run_module(
    kind: str | None,
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    limit_s: float,
) -> tuple[int, str]:
    """Run it to its end; returns its exit code and all it said. Raises `TimeoutExpired`."""
    with tempfile.TemporaryFile() as said:
        process = start_module(
            kind, module, arguments, env=env, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return code, said.read().decode(errors="replace")


def _number(given: IO[bytes] | int, stdout: int) -> int:
    if isinstance(given, int):
        assert given == subprocess.STDOUT, "PIPE is for stdout alone"
        return stdout
    return given.fileno()

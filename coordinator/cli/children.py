"""One child process: it dies with its parent, logs its output, and is stopped in order.

Invariant: a started child is always waited for, and ended only by its own pid.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coordinator.cli.reasons import reason_in, reason_of_event, restarts_rank
from coordinator.protocol.request_line import is_request_line

READ_BYTES = 64 * 1024
LINE_BYTES_MAX = 1024 * 1024
"""A longer line is split."""
LOG_BYTES_MAX = 64 * 1024 * 1024
"""A log above this size becomes `<name>.log.1` and replaces an earlier one."""
TAIL_LINES = 20
"""Number of last lines shown when a child dies."""
DRAIN_LIMIT_S = 1.0
"""How long output is read after a child's end; grandchildren may hold the pipe open."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

EventSink = Callable[[Mapping[str, Any]], None]
"""Called with each JSON object that a child prints on a line of its own."""
LineSink = Callable[[str, str], None]
"""Called with a child's name and each line."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The command to run, and the log of its output."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path


class Child:
    """One process at a time; `run` may be called again after it has ended."""

    def __init__(self, spec: ChildSpec, on_event: EventSink, on_line: LineSink | None) -> None:
        self.name = spec.name
        self._spec = spec
        self._on_event = on_event
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.reason = ""
        """Why the last process failed, if it said so."""

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output."""
        return tuple(self._tail)

    @property
    def pid(self) -> int | None:
        """The pid of the running process, or None."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self) -> int:
        """Start, wait for the end and return the exit status (negative: the signal)."""
        parent = os.getpid()
        self.reason = ""
        process = await asyncio.create_subprocess_exec(
            *self._spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self._spec.env),
            # A process group of its own: the terminal's Ctrl-C must reach only the parent, which
            # stops the children in order. No session of its own: Linux divides the cores among
            # sessions (autogroups), and a gateway beside busy ranks would wait for a core for
            # seconds.
            process_group=0,
            preexec_fn=lambda: _die_with(parent),
        )
        self._process = process
        pump = asyncio.create_task(self._pump(process))
        try:
            return await process.wait()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_LIMIT_S):
                    await pump

    async def stop(self, limit_s: float) -> bool:
        """End the process; False if it took longer than `limit_s` and was killed."""
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
            return False
        return True

    def kill(self) -> None:
        """Kill the process at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _pump(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        pending = b""
        with _Log(self._spec.log) as log:
            while chunk := await process.stdout.read(READ_BYTES):
                log.write(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                if len(pending) > LINE_BYTES_MAX:
                    lines, pending = [*lines, pending], b""
                for line in lines:
                    self._take(line.decode(errors="replace").rstrip())
            if pending:
                self._take(pending.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if not line:
            return
        if self._on_line is not None:
            self._on_line(self.name, line)
        if is_request_line(line):
            # There may be thousands a second, and none of them says why a process ends.
            return
        self._tail.append(line)
        if line.startswith('{"') and line.endswith("}"):
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                # Other ranks may fail because the first one did.
                self.reason = self.reason or reason_of_event(fields) or ""
                if restarts_rank(fields):
                    self.reason = ""
                self._on_event(fields)
        else:
            self.reason = self.reason or reason_in(line) or ""


class _Log:
    """An append-only file that is renamed when it is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, chunk: bytes) -> None:
        """Append; what a full disk has no room for is lost, or the child would wait for it."""
        # A file that could not be opened again is closed: ValueError.
        with contextlib.suppress(OSError, ValueError):
            if self._file.tell() > LOG_BYTES_MAX:
                full = self._path.with_name(self._path.name + ".1")
                self._path.replace(full)
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
            self._file.write(chunk)


def _die_with(parent: int) -> None:
    """Run in the child before exec: have the kernel kill the child when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

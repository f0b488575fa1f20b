"""Several gateway processes on one port, forked from one parent and restarted when they die.

The kernel distributes connections over the children (SO_REUSEPORT). Each child has its own session
with the coordinator, and ranks push tokens directly to the child that owns the request. The parent
has imported vLLM and runs no threads, so a child starts in a fraction of the import time and shares
its memory. A child that dies loses only its own streams.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.protocol.failure_reason import reason_of

DELAY_MIN_S, DELAY_MAX_S = 0.2, 5.0
"""Delay before a dead child is forked again; doubled each time."""
STEADY_S = 60.0
"""A child that has lived longer than this restarts after the shortest delay."""

PR_SET_PDEATHSIG = 1
PF_EXITING = 4
"""Flag of a process that the kernel is taking down."""

log = structlog.get_logger(__name__)

Announce = Callable[[str], None]
"""Announces in one line of JSON that requests are accepted from now on."""


@dataclass(slots=True)
class _Sibling:
    number: int
    started_s: float
    delay_s: float


class PreforkServer:
    """Parent of the processes that serve."""

    def __init__(self, count: int, serve: Callable[[Announce], None]) -> None:
        """`serve` runs in each child until it has drained; it may raise."""
        self._count = count
        self._serve = serve
        self._alive: dict[int, _Sibling] = {}
        self._stopping = False

    def run(self, announce: Announce) -> int:
        """Start all, announce when all are ready, and wait; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_reload)
        # All start in parallel; a pipe closed without a line means that its child failed.
        pipes = [self._fork(number, DELAY_MIN_S) for number in range(self._count)]
        words = [_read_line(pipe) for pipe in pipes]
        if all(words):
            announce(words[0])
        elif not self._stopping:
            self._on_signal(signal.SIGTERM, None)
            return self._wait() or 1
        return self._wait()

    def _fork(self, number: int, delay_s: float) -> int:
        """Fork one child; return the read end of the pipe for its announcement."""
        read, write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(write)
            self._alive[pid] = _Sibling(number, time.monotonic(), delay_s)
            return read
        status = 1
        try:
            os.close(read)
            # The terminal's Ctrl-C goes to the parent alone, which forwards it once.
            os.setpgid(0, 0)
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)
            # A child that still starts reads its configuration anyway.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:
                self._serve(lambda line: _write_line(write, line))
                status = 0
        except (OSError, ValueError) as error:
            print(f"gateway: {reason_of(error)}", file=sys.stderr)
            status = 2
        except BaseException:  # noqa: BLE001 -- every exception ends this process
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Forward the signal; children drain at the first one and exit at the second."""
        is_first, self._stopping = not self._stopping, True
        for pid in tuple(self._alive):
            if not _is_dying(pid):
                os.kill(pid, number)
            elif is_first:
                # Its exit status says nothing about how the others stop.
                del self._alive[pid]

    def _on_reload(self, number: int, _frame: object) -> None:
        """Forward the signal by which children read their configuration again."""
        for pid in tuple(self._alive):
            if not _is_dying(pid):
                os.kill(pid, number)

    def _wait(self) -> int:
        worst = 0
        while self._alive:
            pid, status = os.wait()
            sibling = self._alive.pop(pid, None)
            if sibling is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            if self._stopping:
                worst = worst or abs(code)
                continue
            log.warning("gateway_sibling_died", number=sibling.number, pid=pid, code=code)
            self._restart(sibling)
        return worst

    def _restart(self, sibling: _Sibling) -> None:
        lived_s = time.monotonic() - sibling.started_s
        delay_s = DELAY_MIN_S if lived_s > STEADY_S else sibling.delay_s
        time.sleep(delay_s)
        if not self._stopping:
            os.close(self._fork(sibling.number, min(2 * delay_s, DELAY_MAX_S)))


def _is_dying(pid: int) -> bool:
    """Return whether a process is dead or dying: its streams end before it does."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    # After the name, which may contain anything: state, five numbers, flags.
    return bool(int(stat.rpartition(")")[2].split()[6]) & PF_EXITING)


def _read_line(pipe: int) -> str:
    with os.fdopen(pipe) as stream:
        return stream.readline().strip()


def _write_line(pipe: int, line: str) -> None:
    """Write the line; ignore a parent that no longer reads."""
    try:
        os.write(pipe, f"{line}\n".encode())
    except BrokenPipeError:
        pass
    finally:
        os.close(pipe)

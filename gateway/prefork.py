"""Several gateway processes on one port: forked from one that has imported vLLM, and kept alive.

The kernel spreads connections over the processes (SO_REUSEPORT), each has its own session with the
coordinator, and ranks push tokens straight to the one that waits for them. The parent computes
nothing, so it forks without threads: a sibling starts in a fraction of an import and shares its
memory. A sibling that dies takes only its own streams with it, and is forked again.
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

DELAY_MIN_S, DELAY_MAX_S = 0.2, 5.0
"""Wait before a sibling that died is forked again; doubled each time."""
STEADY_S = 60.0
"""A sibling that has lived so long may die again without a longer wait."""

PR_SET_PDEATHSIG = 1
PF_EXITING = 4
"""Flag of a process that the kernel takes apart."""

log = structlog.get_logger(__name__)

Announce = Callable[[str], None]
"""Tells that requests are accepted from now on: one line of JSON."""


@dataclass(slots=True)
class _Sibling:
    number: int
    born_s: float
    delay_s: float


class PreforkServer:
    """The parent of the processes that serve."""

    def __init__(self, count: int, serve: Callable[[Announce], None]) -> None:
        """`serve` runs in each child until it has drained; it may raise."""
        self._count = count
        self._serve = serve
        self._alive: dict[int, _Sibling] = {}
        self._stopping = False

    def run(self, announce: Announce) -> int:
        """Start all, announce when the last is ready, and wait; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # All start beside each other; a pipe that is closed without a word tells of a failure.
        pipes = [self._fork(number, DELAY_MIN_S) for number in range(self._count)]
        words = [_read_line(pipe) for pipe in pipes]
        if all(words):
            announce(words[0])
        elif not self._stopping:
            self._on_signal(signal.SIGTERM, None)
            return self._wait() or 1
        return self._wait()

    def _fork(self, number: int, delay_s: float) -> int:
        """Fork one; returns the end of a pipe that its announcement comes out of."""
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
            # The terminal's Ctrl-C is for the parent, which passes it on once.
            os.setpgid(0, 0)
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:
                self._serve(lambda line: _write_line(write, line))
                status = 0
        except (OSError, ValueError) as error:
            print(f"gateway: {' '.join(str(error).split())}", file=sys.stderr)
            status = 2
        except BaseException:  # noqa: BLE001 -- the end of this process, whatever it is
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _on_signal(self, number: int, _frame: object) -> None:
        """The first one drains, the second one ends at once: siblings know the difference."""
        is_first, self._stopping = not self._stopping, True
        for pid in tuple(self._alive):
            if not _is_dying(pid):
                os.kill(pid, number)
            elif is_first:
                # How it ended is no part of how the others stop.
                del self._alive[pid]

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
        lived_s = time.monotonic() - sibling.born_s
        delay_s = DELAY_MIN_S if lived_s > STEADY_S else sibling.delay_s
        time.sleep(delay_s)
        if not self._stopping:
            os.close(self._fork(sibling.number, min(2 * delay_s, DELAY_MAX_S)))


def _is_dying(pid: int) -> bool:
    """Say whether a process is dead or about to be: its streams end before it does."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    # Behind the name, which may contain anything: state, five numbers, flags.
    return bool(int(stat.rpartition(")")[2].split()[6]) & PF_EXITING)


def _read_line(pipe: int) -> str:
    with os.fdopen(pipe) as stream:
        return stream.readline().strip()


def _write_line(pipe: int, line: str) -> None:
    """A parent that has gone on does not listen."""
    try:
        os.write(pipe, f"{line}\n".encode())
    except BrokenPipeError:
        pass
    finally:
        os.close(pipe)

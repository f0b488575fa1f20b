"""Stops one thread of another process, as a collective that never ends does: the others go on."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
WALL = 0x4000_0000
"""Wait for threads of any kind."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Frozen:
    """The main thread of a process, while it is held."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.has_ended = False

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Wait for a condition; returns the seconds.

        The end of the process comes to who holds it first, and to its parent only behind that.
        """
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < limit_s, "it did not come true in time"
            self._look()
            time.sleep(0.02)
        return time.monotonic() - started

    def _look(self) -> None:
        if not self.has_ended:
            pid, status = os.waitpid(self._pid, os.WNOHANG | WALL)
            self.has_ended = pid != 0 and not os.WIFSTOPPED(status)


@contextmanager
def frozen_main_thread(pid: int) -> Iterator[Frozen]:
    """Hold the main thread of a process for the length of the block; OSError if that is forbidden.

    Must be left by the thread that entered it.
    """
    _ptrace(PTRACE_SEIZE, pid)
    _ptrace(PTRACE_INTERRUPT, pid)
    os.waitpid(pid, WALL)
    held = Frozen(pid)
    try:
        yield held
    finally:
        if not held.has_ended:
            with suppress(OSError):
                _ptrace(PTRACE_DETACH, pid)


def _ptrace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, None):
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")

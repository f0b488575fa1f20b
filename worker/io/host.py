"""What a rank needs of its host: a clock, a way to wait, and threads for its copies and plans.

The rank's modules read no clock themselves, so that a simulation can bring a host of its own, on
which all ranks of a cell share one virtual clock.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol


class Host(Protocol):
    """The host as the threads of one rank see it."""

    def now_ns(self) -> int:
        """Return the time of the host's monotonic clock, in nanoseconds."""

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait."""

    def thread(self, name: str, begin: Callable[[], None] | None = None) -> Executor:
        """Return what runs calls one after the other beside the caller, after `begin`."""


class MonotonicHost:
    """The machine that this process runs on."""

    now_ns = staticmethod(time.monotonic_ns)
    sleep = staticmethod(time.sleep)

    def thread(self, name: str, begin: Callable[[], None] | None = None) -> Executor:
        """See `Host`."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=begin)


HOST: Host = MonotonicHost()

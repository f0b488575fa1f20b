"""A host whose clock moves only while somebody sleeps."""

from collections.abc import Callable
from concurrent.futures import Executor


class VirtualHost:
    """See `Host`; it has no threads."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """See `Host`, as all that follows."""
        return self._now_ns

    def sleep(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)

    def copy_thread(self, begin: Callable[[], None]) -> Executor:
        raise NotImplementedError("copies need a thread, which this host lacks.")

    def plan_thread(self) -> Executor:
        raise NotImplementedError("plans need a thread, which this host lacks.")

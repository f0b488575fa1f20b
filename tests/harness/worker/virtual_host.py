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

    def thread(self, name: str, begin: Callable[[], None] | None = None) -> Executor:
        raise NotImplementedError(f"this host lacks a thread to {name}.")

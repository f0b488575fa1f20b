"""Code that waits in the middle, on one clock: a fiber runs until it pauses, then another does.

A fiber is a greenlet: it has a stack of its own, and the simulation says when it runs. So a run is
a function of its seed, in one thread.
"""

import contextlib
from collections.abc import Callable

from greenlet import getcurrent, greenlet


class FiberEnded(BaseException):
    """The process that runs here has ended; nothing in it may go on."""


class Fiber:
    """A call that can pause."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._greenlet = greenlet(body)
        self.is_ending = False

    def resume(self) -> None:
        """Let it run until it pauses or is over; raises what it raises."""
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()

    def end(self) -> None:
        """Let it unwind; it never pauses again."""
        self.is_ending = True
        if self._greenlet:  # It has begun and is not over.
            with contextlib.suppress(BaseException):  # It has ended, whatever it still tries.
                self.resume()
            assert self._greenlet.dead

    def pause(self) -> None:
        """Let the one who resumed this fiber, in which the caller runs, go on until the next time.

        Raises:
            FiberEnded: the process has ended.
        """
        if self.is_ending:
            raise FiberEnded
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()
        if self.is_ending:
            raise FiberEnded

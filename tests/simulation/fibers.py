"""Code that waits in the middle, on one clock: a fiber runs until it pauses, then another does.

Each fiber has a thread of its own, but only one thread of all runs at any time, and the simulation
says which: a run is a function of its seed.
"""

import contextlib
import threading
from collections.abc import Callable


class FiberEnded(BaseException):
    """The process that runs here has ended; nothing in it may go on."""


class _Carrier:
    """A thread that runs one fiber after another."""

    def __init__(self) -> None:
        self.fiber: Fiber
        self.runs = threading.Lock()
        """Held by the fiber while it may not run."""
        self.is_paused = threading.Lock()
        """Held by the simulation while the fiber runs."""
        self.runs.acquire()
        self.is_paused.acquire()
        threading.Thread(target=self._run, name="fiber", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.runs.acquire()
            self.fiber.run()
            self.is_paused.release()


_idle: list[_Carrier] = []


class Fiber:
    """A call that can pause; used by the simulation's thread, except `run` and `pause`."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._carrier: _Carrier | None = None
        self._error: BaseException | None = None
        self.is_over = False
        self.is_ending = False

    def resume(self) -> None:
        """Let it run until it pauses or is over; raises what it raises."""
        if self._carrier is None:
            self._carrier = _idle.pop() if _idle else _Carrier()
            self._carrier.fiber = self
        carrier = self._carrier
        carrier.runs.release()
        carrier.is_paused.acquire()
        if self.is_over:
            _idle.append(carrier)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Let it unwind; it never pauses again."""
        self.is_ending = True
        if self._carrier is not None and not self.is_over:
            with contextlib.suppress(BaseException):  # It has ended, whatever it still tries.
                self.resume()
            assert self.is_over

    def run(self) -> None:
        """Run the call; on the carrier's thread."""
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001 -- it is raised where the fiber is resumed
            self._error = error
        self.is_over = True

    def pause(self) -> None:
        """Let the simulation go on until it resumes this fiber, in which the caller runs."""
        carrier = self._carrier
        assert carrier is not None
        if self.is_ending:
            raise FiberEnded
        carrier.is_paused.release()
        carrier.runs.acquire()
        if self.is_ending:
            raise FiberEnded

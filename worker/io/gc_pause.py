"""Python's cyclic garbage collector stands still while a rank switches.

A move makes and drops a few hundred thousand objects at once, which sets off collections of 7 to 17
ms while every stream of the cell waits. They come when the device computes the first new step.
"""

import gc
import time

PAUSE_MAX_S = 2.0
"""Whatever becomes of a switch, collections go on after so long."""


class GcPause:
    """Pauses collections; used by the rank's main loop alone."""

    def __init__(self) -> None:
        self._resumes_at_s = 0.0

    def pause(self) -> None:
        """No collection begins from now on, unless somebody asks for one."""
        if gc.isenabled():
            gc.disable()
            self._resumes_at_s = time.monotonic() + PAUSE_MAX_S

    def resume(self) -> None:
        """Collect as before, if it was this that stopped it."""
        if self._resumes_at_s:
            gc.enable()
            self._resumes_at_s = 0.0

    def look(self) -> None:
        """Resume if the pause takes too long."""
        if self._resumes_at_s and time.monotonic() > self._resumes_at_s:
            self.resume()

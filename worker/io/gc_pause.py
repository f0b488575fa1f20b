"""Pauses Python's cyclic garbage collector while a rank switches.

A migration creates and drops a few hundred thousand objects at once, which triggers collections of
7 to 17 ms while every stream of the cell waits. The first new tokens do not wait for them either.
"""

import gc

from worker.io.host import HOST, Host

PAUSE_MIN_S = 0.25
"""Minimum pause of a rank that has work: some steps follow the switch before it ends."""

PAUSE_MAX_S = 2.0
"""Maximum pause, however the switch ends."""


class GcPause:
    """Pauses collections; used by the rank's main loop alone."""

    def __init__(self, host: Host = HOST) -> None:
        self._host = host
        self._resumes_at_ns = self._may_resume_ns = 0

    def pause(self) -> None:
        """Start no collection from now on, except explicit ones; a pause begins anew."""
        if gc.isenabled() or self._resumes_at_ns:
            gc.disable()
            now_ns = self._host.now_ns()
            self._may_resume_ns = now_ns + int(PAUSE_MIN_S * 1e9)
            self._resumes_at_ns = now_ns + int(PAUSE_MAX_S * 1e9)

    def resume(self) -> None:
        """Resume collections if this pause stopped them."""
        if self._resumes_at_ns:
            gc.enable()
            self._resumes_at_ns = 0

    def resume_soon(self) -> None:
        """Resume if the pause has lasted for `PAUSE_MIN_S`; call it after steps until it has."""
        if self._resumes_at_ns and self._host.now_ns() >= self._may_resume_ns:
            self.resume()

    def look(self) -> None:
        """Resume if the pause exceeds `PAUSE_MAX_S`."""
        if self._resumes_at_ns and self._host.now_ns() > self._resumes_at_ns:
            self.resume()

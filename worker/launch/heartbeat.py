"""Whether a rank's process makes progress as a whole, as the launcher sees it.

The watchdog in a rank detects a stuck main loop. It cannot run if the whole process is stopped, or
if a call that never returns holds the interpreter's lock. So it beats into memory shared with the
launcher, which kills a process whose beats stop.
"""

import mmap
import struct

_COUNT = struct.Struct("Q")


class Heartbeat:
    """A count in memory shared with processes forked after it was made."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNT.size)

    def beat(self) -> None:
        """Count one more beat; called repeatedly by one thread of the rank."""
        _COUNT.pack_into(self._memory, 0, self.beats + 1)

    @property
    def beats(self) -> int:
        """The number of beats; 0 until the rank is ready."""
        return int(_COUNT.unpack_from(self._memory)[0])

    def close(self) -> None:
        """Close the memory in this process."""
        self._memory.close()

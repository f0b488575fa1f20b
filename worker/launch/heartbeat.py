"""Whether a rank's process goes on as a whole, as the launcher sees it.

The watchdog in a rank sees that its main loop stands still. It sees nothing if the whole process
was stopped, or if a call that never returns keeps the interpreter's lock. So it beats into memory
that the launcher has a part of as well, and the launcher ends a process whose beat stays away.
"""

import mmap
import struct

_COUNT = struct.Struct("Q")


class Heartbeat:
    """A count in memory that processes share which are forked after it was made."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNT.size)

    def beat(self) -> None:
        """Count one more; called by one thread of the rank, again and again."""
        _COUNT.pack_into(self._memory, 0, self.beats + 1)

    @property
    def beats(self) -> int:
        """How many there were; 0 as long as the rank is not ready."""
        return int(_COUNT.unpack_from(self._memory)[0])

    def close(self) -> None:
        """Give the memory up in this process."""
        self._memory.close()

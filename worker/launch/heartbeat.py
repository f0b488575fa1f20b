"""Whether a rank's process makes progress as a whole, as the launcher sees it.

The watchdog in a rank detects a stuck main loop. It cannot run if the whole process is stopped, or
if a call that never returns holds the interpreter's lock. So it beats into memory shared with the
launcher, which kills a process whose beats stop. Each beat has the passes of the main loop.
"""

import mmap
import struct

_COUNTS = struct.Struct("QQ")
"""Beats, and passes of the main loop."""


class Heartbeat:
    """Two counts in memory shared with processes forked after it was made."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNTS.size)

    def beat(self, passes: int) -> None:
        """Count one more beat; called repeatedly by one thread of the rank.

        `passes` grows while the rank computes in no group that has lost a member.
        """
        _COUNTS.pack_into(self._memory, 0, self.beats + 1, passes)

    @property
    def beats(self) -> int:
        """The number of beats; 0 until the rank is ready."""
        return int(_COUNTS.unpack_from(self._memory)[0])

    @property
    def passes(self) -> int:
        """The passes of the main loop as of the last beat."""
        return int(_COUNTS.unpack_from(self._memory)[1])

    def close(self) -> None:
        """Close the memory in this process."""
        self._memory.close()

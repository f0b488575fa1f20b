"""Whether the processes whose memory a rank borrows still live.

On CUDA the mapping of a process that has ended is undefined, so a step that has read it does not
count. The kernel marks a process that is ending before it releases the device. So a step after
which no lender has the mark has read memory that was there.
"""

from collections.abc import Iterable
from pathlib import Path

PF_EXITING = 0x4
"""The kernel's mark of a process that is ending (include/linux/sched.h)."""

_FLAGS = 6
"""The place of the marks in /proc/PID/stat, counted from the state."""


class LenderLostError(RuntimeError):
    """A lender has ended, so the results of a step that borrows are void; one sentence."""


def is_ending(pid: int) -> bool:
    """Return whether a process is ending or has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    # The name, in brackets, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "ZX" or bool(int(fields[_FLAGS]) & PF_EXITING)


def check_lenders(pids: Iterable[int]) -> None:
    """Raise `LenderLostError` if one of these processes is ending."""
    if any(map(is_ending, pids)):
        raise LenderLostError(
            "a rank that lends weights has ended: this rank ends too, and all that share a copy of "
            "the weights start together."
        )

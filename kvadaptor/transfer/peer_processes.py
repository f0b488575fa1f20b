"""Whether the processes of peers on this host still run."""

import os
import select
from collections.abc import Mapping


class PeerProcesses:
    """Processes by rank, each held by a descriptor of its own: its pid may be another's later."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """All of them run now; raises OSError for one that does not, or where Linux has no pidfd.

        The descriptors stay open until this process ends.
        """
        self._polls: dict[int, select.poll] = {}
        for rank, pid in pids.items():
            self._polls[rank] = select.poll()
            self._polls[rank].register(os.pidfd_open(pid), select.POLLIN)

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended; any thread."""
        found = self._polls.get(rank)
        return found is not None and bool(found.poll(0))

"""What the launcher of a cell's ranks tells the coordinator: which processes have ended.

A process that ended is known to do nothing any more, so nobody waits for its lease.
"""

import msgspec

from comm_pool.layout import Rank


class RanksEnded(msgspec.Struct, frozen=True, tag=True):
    """The newest process of each rank that is known to have ended, as (rank, incarnation).

    Level-triggered: it replaces what was said before, and is said again in each new session.
    """

    version: int
    ended: tuple[tuple[Rank, int], ...]

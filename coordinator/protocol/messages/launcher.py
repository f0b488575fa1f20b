"""What the launcher of a cell's ranks and the coordinator tell each other.

The one says which processes have ended: such a process is known to do nothing any more, so nobody
waits for its lease. The other says when all are to be started again.
"""

import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.messages.message import Message


class RanksEnded(msgspec.Struct, frozen=True, tag=True):
    """The newest process of each rank that is known to have ended, as (rank, incarnation).

    Level-triggered: it replaces what was said before, and is said again in each new session.
    """

    version: int
    ended: tuple[tuple[Rank, int], ...]


class RenewRanks(Message, frozen=True):
    """These ranks are to be started again together, so that they have communicators again.

    All of them, for groups of all widths, or those of one group while the others serve. `ranks` has
    the process of each, as (rank, incarnation), that the coordinator knows: where newer ones have
    been started since, there is nothing to do.
    """

    ranks: tuple[tuple[Rank, int], ...]

"""Messages between the launcher of a cell's ranks and the coordinator.

The launcher reports ended processes: an ended process does nothing any more, so the coordinator
need not wait for its lease. The coordinator says which ranks to restart together.
"""

import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.messages.message import Message


class RanksEnded(msgspec.Struct, frozen=True, tag=True):
    """The newest ended process of each rank, as (rank, incarnation).

    Level-triggered: it replaces earlier reports and is repeated in each new session.
    """

    version: int
    ended: tuple[tuple[Rank, int], ...]
    without_fault: tuple[Rank, ...] = ()
    """Those of them that ended on demand, or with a peer that they cannot serve without."""


class RenewRanks(Message, frozen=True):
    """Restart these ranks together, so that they have communicators again.

    Either all ranks, for groups of all widths, or those of one group while the others serve.
    `ranks` names each process, as (rank, incarnation), that the coordinator knows. If newer ones
    have been started since, the launcher does nothing.
    """

    ranks: tuple[tuple[Rank, int], ...]

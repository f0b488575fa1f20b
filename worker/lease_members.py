"""Which processes share each lease of this rank.

A lease in which a lost process had a share is worth nothing, and its pages are to be freed, whoever
remembers the loss: the coordinator may have started anew since. Used by the rank's main loop.
"""

from collections.abc import Mapping

from comm_pool.layout import Rank

Ranks = tuple[Rank, ...]


class LeaseMembers:
    """The incarnations that the members of each group had when it was formed last."""

    def __init__(self) -> None:
        self._members: dict[Ranks, tuple[int | None, ...]] = {}

    def formed(self, ranks: Ranks, present: Mapping[Rank, int]) -> None:
        """The group leases pages, or will, with its members as they are now."""
        self._members[ranks] = tuple(present.get(rank) for rank in ranks)

    def take_lost(self, present: Mapping[Rank, int], bound: Ranks) -> list[Ranks]:
        """Return, once, the groups that lack a member; the one that is `bound` leaves first."""
        lost = [
            ranks
            for ranks, members in self._members.items()
            if ranks != bound and members != tuple(present.get(rank) for rank in ranks)
        ]
        for ranks in lost:
            del self._members[ranks]
        return lost

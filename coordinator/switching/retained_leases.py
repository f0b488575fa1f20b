"""Which pages of unbound groups' leases are still needed, as reported by their leaders.

Paused tasks of an unbound group retain some of its leased pages. Every member must retain the same
ones, or their lease tables drift apart. Invariant: the retained set that is sent to members only
shrinks while the group is unbound, and is constant while it is bound. The switcher calls this
module.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import LeaseRetention
from coordinator.protocol.terms import Binding


@dataclass(slots=True)
class _Lease:
    retention: LeaseRetention | None = None
    is_bound: bool = False
    """The group serves: its lease is whole, and `retention` is what it started from."""
    last_formation: int = 0
    """The last formation that leased pages; retained sets of earlier ones are out of date."""


class RetainedLeases:
    """The retained lease indices of each group, by the key of its lease."""

    __slots__ = ("_given_up", "_leases", "_lost_in")

    def __init__(self) -> None:
        self._leases: dict[tuple[Rank, ...], _Lease] = {}
        self._lost_in: dict[Rank, int] = {}
        """The last epoch in which a rank was lost; leases formed up to then are worthless."""
        self._given_up: dict[tuple[Rank, ...], int] = {}
        """The same for groups whose members gave pages up before this coordinator started."""

    def on_report(self, leader: Rank, reported: tuple[LeaseRetention, ...]) -> bool:
        """Store what a leader still needs; return whether anything changed."""
        own = [retention for retention in reported if min(retention.ranks) == leader]
        return [self._accept(retention) for retention in own].count(True) > 0

    def bind(self, binding: Binding) -> None:
        """Freeze the set: the group is about to lease on top of the retained pages."""
        if binding.group.width == 1:
            # A rank alone owns its pages and leases none.
            return
        lease = self._leases.setdefault(binding.group.lease_key, _Lease())
        lease.is_bound = True
        lease.last_formation = binding.formation

    def unbind(self, binding: Binding) -> None:
        """Accept reports of the group's leader again."""
        if lease := self._leases.get(binding.group.lease_key):
            lease.is_bound = False

    def drop(self, rank: Rank, epoch: int) -> None:
        """Give up every lease that the rank shares: its part of the KV is lost.

        Reports of formations up to `epoch` no longer count.
        """
        self._lost_in[rank] = epoch
        for ranks in self._leases:
            if rank in ranks:
                self._give_up(ranks, epoch)

    def recover(self, held: Mapping[Rank, Collection[tuple[Rank, ...]]], epoch: int) -> None:
        """Give up leases in which only some members have pages; `epoch` is the highest so far.

        Those members heard from an earlier coordinator that a member was lost, while others that
        live may not have heard.
        """
        for ranks in set(chain.from_iterable(held.values())):
            if any(ranks not in held[rank] for rank in ranks if rank in held):
                self._given_up[ranks] = epoch
                self._give_up(ranks, epoch)

    def know(self, binding: Binding) -> None:
        """Record that these ranks may share a lease: if one is lost, the others must know."""
        if binding.group.width > 1:
            self._leases.setdefault(binding.group.lease_key, _Lease())

    def for_rank(self, rank: Rank) -> tuple[LeaseRetention, ...]:
        """Return what the rank retains, for each group that it is a member of."""
        return tuple(
            lease.retention
            for ranks, lease in self._leases.items()
            if rank in ranks and lease.retention
        )

    def _give_up(self, ranks: tuple[Rank, ...], epoch: int) -> None:
        lease = self._leases.setdefault(ranks, _Lease())
        version = lease.retention.version if lease.retention else 0
        lease.retention = LeaseRetention(ranks, version + 1, (), epoch)

    def _accept(self, retention: LeaseRetention) -> bool:
        lease = self._leases.setdefault(retention.ranks, _Lease())
        if lease.is_bound or retention.formation < lease.last_formation:
            return False
        if lease.retention is not None and _order(retention) <= _order(lease.retention):
            return False
        lost_in = (self._lost_in.get(rank, -1) for rank in retention.ranks)
        if retention.formation <= max(self._given_up.get(retention.ranks, -1), *lost_in):
            # The leader had not heard of the loss; its tasks learn of it from the echo.
            retention = msgspec.structs.replace(retention, indices=())
        lease.retention = retention
        return True


def _order(retention: LeaseRetention) -> tuple[int, int]:
    return retention.formation, retention.version

"""Detects that a rank is in a group that has lost a member, or is stuck in it. Pure.

The watchdog calls this from another thread than the one that owns the participant, so the objects
read here are replaced as a whole, never changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, RankDown
from coordinator.protocol.switch_participant import Joined
from coordinator.protocol.terms import Binding


class Participation(Protocol):
    """The part of a switch participant that another thread may read."""

    rank: Rank

    @property
    def joined(self) -> Joined | None:
        """The formation that the rank is joined to, and the incarnations of its members."""


GRACE_S = 0.2
"""Grace time before an abort.

An ejected peer that is only slow ends its step within it. The others then need no abort, and their
group can be formed again.
"""


@dataclass(frozen=True, slots=True)
class _DegradedFormation:
    """The formation that lacks a member, and since when this rank knows."""

    formation: int
    since_s: float


def _lacks_one(joined: Joined, present: Mapping[Rank, int]) -> bool:
    binding, members = joined
    return len(members) > 1 and any(
        present.get(rank) != members.get(rank) for rank in binding.group.ranks
    )


class PeerFailure:
    """Whether the main loop should have left its group by now. Pure: times are arguments."""

    def __init__(
        self,
        participant: Participation,
        limit_s: float,
        draining_group: Callable[[], Joined | None] = lambda: None,
    ) -> None:
        """`draining_group`: the group that the rank has left, while it may still compute in it."""
        self._participant = participant
        self._draining_group = draining_group
        self._limit_s = limit_s
        self._present: dict[Rank, int] | None = None
        self._degraded: _DegradedFormation | None = None
        self._unblocked = -1
        """The aborted formation; this rank leaves it even if the lost rank returns."""

    def heard(self, message: RankDown) -> None:
        """Record the members that the coordinator last listed."""
        if isinstance(message, Directive) and message.stage.epoch > 0:
            self._present = dict(message.members)

    def degraded_binding(self) -> Binding | None:
        """Return the group that the rank is joined to, or computes in, if it lacks a member."""
        present = self._present
        for joined in (self._participant.joined, self._draining_group()):
            if joined is None or present is None:
                continue
            if joined[0].formation == self._unblocked or _lacks_one(joined, present):
                return joined[0]
        return None

    def must_unblock(self, now_s: float) -> bool:
        """Return whether to unblock this rank: a live member of such a group, past the grace time.

        A rank that was itself lost, such as one that was stopped and continues, is not unblocked;
        nor is a rank whose last step in a group that it has left is in flight.
        """
        lacking_s, joined, present = self._lacking_s(now_s), self._participant.joined, self._present
        if lacking_s < GRACE_S or joined is None or present is None:
            return False
        binding, members = joined
        own = self._participant.rank
        if binding != self.degraded_binding() or present.get(own) != members.get(own):
            return False
        self._unblocked = binding.formation
        return True

    def is_stuck(self, now_s: float) -> bool:
        """Return whether the rank has been in a group without a member beyond the limit."""
        return self._lacking_s(now_s) > self._limit_s

    def _lacking_s(self, now_s: float) -> float:
        """Return for how long the group has been known to lack a member; 0 if it does not."""
        binding = self.degraded_binding()
        if binding is None:
            self._degraded = None
            return 0.0
        if self._degraded is None or self._degraded.formation != binding.formation:
            self._degraded = _DegradedFormation(binding.formation, now_s)
        return now_s - self._degraded.since_s

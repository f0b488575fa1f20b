"""Detects that a rank is in a group that has lost a member, or is stuck in it. Pure.

Three threads meet here. The main loop replaces the joined formation, and the session's thread the
members, each as a whole. The watchdog's thread alone changes the rest, in `look`, which decides by
one reading of both.
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
"""Grace time before an abort, unless the peer's process has ended.

An ejected peer that is only slow ends its step within it. The others then need no abort, and their
group can be formed again.
"""


@dataclass(frozen=True, slots=True)
class _DegradedFormation:
    """The formation that lacks a member, and since when this rank knows."""

    formation: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Loss:
    """What to do about a group that lacks a member."""

    binding: Binding
    """The formation to abort."""
    must_unblock: bool
    """Whether to unblock this rank from its collectives, too."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the coordinator says of all ranks."""

    present: Mapping[Rank, int]
    """The incarnation of each rank that takes part."""
    ended: frozenset[Rank]
    """The ranks whose last process has ended."""

    def lacks_one_of(self, joined: Joined) -> bool:
        """Return whether a member of the formation does not take part any more."""
        binding, members = joined
        return len(members) > 1 and any(
            self.present.get(rank) != members.get(rank) for rank in binding.group.ranks
        )

    def has_ended_one_of(self, joined: Joined) -> bool:
        """Return whether the process of a member has ended, maybe for a newer one."""
        binding, members = joined
        return any(
            rank in self.ended or self.present.get(rank, was) != was
            for rank, was in members.items()
            if rank in binding.group.ranks
        )


class PeerFailure:
    """Whether the main loop should have left its group by now. Pure: times are arguments."""

    def __init__(
        self,
        participant: Participation,
        limit_s: float,
        draining_groups: Callable[[], tuple[Joined, ...]] = tuple,
    ) -> None:
        """`draining_groups`: groups that the rank has left, while it may still compute in them."""
        self._participant = participant
        self._draining_groups = draining_groups
        self._limit_s = limit_s
        self._known: _Known | None = None
        self._degraded: _DegradedFormation | None = None
        self._unblocked = -1
        """The aborted formation; this rank leaves it even if the lost rank returns."""
        self._endless: frozenset[int] = frozenset()
        """Formations left in a step that lacked a member: it never ends, even if that returns."""

    def heard(self, message: RankDown) -> Binding | None:
        """Record the members that the coordinator lists; return what lacks one by now."""
        if isinstance(message, Directive) and message.stage.epoch > 0:
            self._known = _Known(dict(message.members), frozenset(message.ended))
        return self.degraded_binding()

    def degraded_binding(self) -> Binding | None:
        """Return the group that the rank is joined to, or computes in, if it lacks a member."""
        return self._degraded_in(self._participant.joined, self._known)

    def _degraded_in(self, joined: Joined | None, known: _Known | None) -> Binding | None:
        if known is None:
            return None
        draining = self._draining_groups()
        self._endless |= {each[0].formation for each in draining if known.lacks_one_of(each)}
        if joined is not None and known.lacks_one_of(joined):
            return joined[0]
        groups = draining if joined is None else (joined, *draining)
        lost = self._endless | {self._unblocked}
        return next((binding for binding, _ in groups if binding.formation in lost), None)

    def look(self, now_s: float) -> Loss | None:
        """Return what to do about a group that lacks a member, if one does; call it on every poll.

        `must_unblock` holds for a live member of the joined group, past the grace time: it has to
        leave then, even if the lost rank returns. There is no grace time if the lost rank's process
        has ended, as its step never will. A rank that was itself lost, such as one that was stopped
        and continues, is not unblocked; nor is a rank whose last step in a group that it has left
        is in flight.
        """
        joined, known = self._participant.joined, self._known
        binding = self._degraded_in(joined, known)
        if binding is None or known is None:
            self._degraded = None
            return None
        if self._degraded is None or self._degraded.formation != binding.formation:
            self._degraded = _DegradedFormation(binding.formation, now_s)
        must_unblock = (
            joined is not None
            and joined[0] == binding
            and self._is_present(joined, known)
            and (known.has_ended_one_of(joined) or now_s - self._degraded.since_s >= GRACE_S)
        )
        if must_unblock:
            self._unblocked = binding.formation
        return Loss(binding, must_unblock)

    def _is_present(self, joined: Joined, known: _Known) -> bool:
        own = self._participant.rank
        return known.present.get(own) == joined[1].get(own)

    def is_stuck(self, now_s: float) -> bool:
        """Return whether the rank is still in the group of the last look, beyond the limit."""
        binding, degraded = self.degraded_binding(), self._degraded
        if binding is None or degraded is None or degraded.formation != binding.formation:
            return False
        return now_s - degraded.since_s > self._limit_s

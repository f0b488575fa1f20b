"""Whether a rank is in a group that has lost a member, perhaps itself, and is stuck in it. Pure.

Asked by the watchdog, from another thread than the one that owns the seat: everything that is read
here is replaced as a whole, never changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, RankDown
from coordinator.protocol.switch_participant import Joined
from coordinator.protocol.terms import Binding


class Participation(Protocol):
    """The part of a seat that is looked at, from another thread."""

    rank: Rank

    @property
    def joined(self) -> Joined | None:
        """What the rank is joined to, and the incarnations of its members."""


GRACE_S = 0.2
"""A peer that is left out although it lives, as it is slow, comes to the end of its step: then the
others come out of it by themselves, and their group can be formed again."""


@dataclass(frozen=True, slots=True)
class _DegradedFormation:
    """The formation that lacks a member, and since when that is known."""

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
        behind: Callable[[], Joined | None] = lambda: None,
    ) -> None:
        """`behind`: the group that the rank has left, while it may still compute in it."""
        self._participant = participant
        self._behind = behind
        self._limit_s = limit_s
        self._present: dict[Rank, int] | None = None
        self._bereaved: _DegradedFormation | None = None
        self._unblocked = -1
        """The formation that the rank is let out of: it has to leave it, whoever comes back."""

    def heard(self, message: RankDown) -> None:
        """Take what the coordinator said last of who is there."""
        if isinstance(message, Directive) and message.stage.epoch > 0:
            self._present = dict(message.members)

    def bereaved(self) -> Binding | None:
        """Return what the rank is joined to, or computes in, if that lacks a member."""
        present = self._present
        for joined in (self._participant.joined, self._behind()):
            if joined is None or present is None:
                continue
            if joined[0].formation == self._unblocked or _lacks_one(joined, present):
                return joined[0]
        return None

    def must_be_let_out(self, now_s: float) -> bool:
        """Say whether the rank is in such a group, is not itself who was lost, and has had time.

        One that was stopped and goes on ends where it is stuck: the others have done without it.
        Nor is a rank let out of a group that it has left while its last step is under way.
        """
        lacking_s, joined, present = self._lacking_s(now_s), self._participant.joined, self._present
        if lacking_s < GRACE_S or joined is None or present is None:
            return False
        binding, members = joined
        own = self._participant.rank
        if binding != self.bereaved() or present.get(own) != members.get(own):
            return False
        self._unblocked = binding.formation
        return True

    def is_stuck(self, now_s: float) -> bool:
        """Say whether the rank has been in a group without a member for longer than the limit."""
        return self._lacking_s(now_s) > self._limit_s

    def _lacking_s(self, now_s: float) -> float:
        """For how long it has been known that the group lacks a member; 0 if it does not."""
        binding = self.bereaved()
        if binding is None:
            self._bereaved = None
            return 0.0
        if self._bereaved is None or self._bereaved.formation != binding.formation:
            self._bereaved = _DegradedFormation(binding.formation, now_s)
        return now_s - self._bereaved.since_s

"""Whether a rank is in a group that has lost a member, perhaps itself, and is stuck in it. Pure.

Asked by the watchdog, from another thread than the one that owns the seat: everything that is read
here is replaced as a whole, never changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from comm_pool.layout import Rank
from coordinator.protocol.messages import Binding, Directive, RankDown


class Seated(Protocol):
    """The part of a seat that is looked at, from another thread."""

    rank: Rank

    @property
    def joined(self) -> tuple[Binding, Mapping[Rank, int | None]] | None:
        """What the rank is joined to, and the incarnations of its members."""


@dataclass(frozen=True, slots=True)
class _Bereaved:
    """The formation that lacks a member, and since when that is known."""

    born: int
    since_s: float


class PeerLoss:
    """Whether the main loop should have left its group by now. Pure: times are arguments."""

    def __init__(self, seat: Seated, limit_s: float) -> None:
        self._seat = seat
        self._limit_s = limit_s
        self._present: dict[Rank, int] | None = None
        self._bereaved: _Bereaved | None = None

    def heard(self, message: RankDown) -> None:
        """Take what the coordinator said last of who is there."""
        if isinstance(message, Directive) and message.stage.epoch > 0:
            self._present = dict(message.members)

    def bereaved(self) -> Binding | None:
        """Return what the rank is joined to if that lacks a member."""
        joined, present = self._seat.joined, self._present
        if joined is None or present is None:
            return None
        binding, members = joined
        lost = [
            rank
            for rank in binding.group.ranks
            if len(members) > 1 and present.get(rank) != members.get(rank)
        ]
        return binding if lost else None

    def is_stuck(self, now_s: float) -> bool:
        """Say whether the rank has been in a group without a member for longer than the limit."""
        binding = self.bereaved()
        if binding is None:
            self._bereaved = None
        elif self._bereaved is None or self._bereaved.born != binding.born:
            self._bereaved = _Bereaved(binding.born, now_s)
        bereaved = self._bereaved
        return bereaved is not None and now_s - bereaved.since_s > self._limit_s

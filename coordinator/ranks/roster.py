"""What the coordinator knows of each rank: its hello, its newest report, when it was heard.

Invariant: only messages of the newest incarnation of a rank count, reports are kept newest first,
and a process that was seen to end is never heard again. Called by the switcher, the task pool's
placement and the admin views; it decides nothing about layouts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from comm_pool.layout import Group, Layout, Rank, StepMode
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.terms import Stage
from coordinator.ranks.mode_quarantine import ModeQuarantine


class Arrival(Enum):
    """What a hello means."""

    FIRST = auto()
    """The rank was never heard before."""
    AGAIN = auto()
    """The same process opened a new session."""
    RESTARTED = auto()
    """A new process took the rank's place; the old one's memory is gone."""
    STALE = auto()
    """An older process than the one that is known."""


@dataclass(slots=True)
class RankRecord:
    """One rank, in its newest incarnation."""

    hello: RankHello
    heard_at_ms: int
    report: Report | None = None
    restarts: int = 0
    is_connected: bool = True
    has_exited: bool = False
    out_until_ms: int = 0
    """Until then the process is left out of all layouts, as it held the others up."""
    cuts: dict[str, int] = field(default_factory=dict)
    """The last break of each link to a gateway that was acted on."""
    closed: frozenset[tuple[Rank, ...]] = frozenset()
    """Groups that the process can never form again."""

    @property
    def incarnation(self) -> int:
        """The newest incarnation."""
        return self.hello.incarnation


class Roster:
    """The ranks of a cell as far as they were heard.

    Only ranks of one cohort can form wide groups. Where communicators end with a process, those are
    one that were started together; where they lie in memory that outlives it, all are. A group that
    one of its members has closed, to get out of it alive, is closed as long as that process lives.
    """

    __slots__ = ("_seen", "guard", "narrowest", "widest", "world")

    def __init__(self, world: int, narrowest: int = 1) -> None:
        self.world = world
        self.narrowest = narrowest
        """The narrowest groups that can serve; ranks in narrower ones wait for others."""
        self._seen: dict[Rank, RankRecord] = {}
        self.widest = 1
        """The widest group that any process could be in."""
        self.guard = ModeQuarantine()
        """What their modes' probes gave."""

    def __getitem__(self, rank: Rank) -> RankRecord:
        """Return what is known of a rank that was heard."""
        return self._seen[rank]

    def get(self, rank: Rank) -> RankRecord | None:
        """Return what is known of a rank, if it was ever heard."""
        return self._seen.get(rank)

    def __contains__(self, rank: Rank) -> bool:
        """Say whether the rank was ever heard."""
        return rank in self._seen

    def __iter__(self) -> Iterator[Rank]:
        """All ranks that were ever heard, ascending."""
        return iter(sorted(self._seen))

    def on_hello(self, hello: RankHello, now_ms: int) -> Arrival:
        """Take a session's first message."""
        seen = self._seen.get(hello.rank)
        self.widest = max(self.widest, *hello.widths)
        if seen is None:
            self._seen[hello.rank] = RankRecord(hello, now_ms)
            return Arrival.FIRST
        is_older = hello.incarnation < seen.incarnation
        if is_older or (seen.has_exited and hello.incarnation == seen.incarnation):
            return Arrival.STALE
        if hello.incarnation > seen.incarnation:
            self.guard.renewed(hello.rank)
            self._seen[hello.rank] = RankRecord(hello, now_ms, restarts=seen.restarts + 1)
            return Arrival.RESTARTED
        seen.hello = hello
        seen.heard_at_ms = now_ms
        seen.is_connected = True
        return Arrival.AGAIN

    def on_report(self, report: Report, now_ms: int) -> bool:
        """Take a report; say whether it came from the known incarnation and counts.

        An older report of the same process shows that it lives, but replaces nothing.
        """
        seen = self._seen.get(report.rank)
        if seen is None or seen.incarnation != report.incarnation or seen.has_exited:
            return False
        seen.heard_at_ms = now_ms
        seen.closed = seen.closed.union(report.closed)
        self.guard.take(report.probed)
        if seen.report is None or _order(report) >= _order(seen.report):
            seen.report = report
        return True

    def take_cuts(self, report: Report) -> list[str]:
        """Return the addresses that the rank has lost its link to since the last call."""
        seen = self._seen[report.rank]
        before, seen.cuts = seen.cuts, {each.reply_to: each.number for each in report.links}
        return [to for to, number in seen.cuts.items() if number > before.get(to, 0)]

    def on_closed(self, rank: Rank, incarnation: int) -> None:
        """Take note that a session ended; the process may live and come back."""
        seen = self._seen.get(rank)
        if seen is not None and seen.incarnation == incarnation:
            seen.is_connected = False

    def on_exited(self, rank: Rank) -> None:
        """Take note that the process ended; what is still under way from it is not heard."""
        seen = self._seen.get(rank)
        if seen is not None:
            seen.has_exited = True
            seen.is_connected = False

    def report_of(self, rank: Rank) -> Report | None:
        """Return the newest report of the known incarnation."""
        seen = self._seen.get(rank)
        return seen.report if seen else None

    def reported(self) -> tuple[Rank, ...]:
        """Return the ranks whose process lives as far as known and has reported, ascending."""
        return tuple(rank for rank in self if self[rank].report and not self[rank].has_exited)

    def leases(self) -> dict[Rank, tuple[tuple[Rank, ...], ...]]:
        """Return the groups that each living rank had pages for when its session began."""
        return {rank: self[rank].hello.leases for rank in self.reported()}

    def silent_since(self, rank: Rank, now_ms: int) -> int:
        """Return for how long the rank was not heard, in milliseconds."""
        return now_ms - self._seen[rank].heard_at_ms

    def is_out(self, rank: Rank, now_ms: int) -> bool:
        """Say whether to leave the rank's process out: for a while, or as it computes wrongly."""
        return now_ms < self._seen[rank].out_until_ms or self.guard.is_wrong(rank)

    def forgive(self, stall_ms: int, now_ms: int) -> None:
        """Start all silences later: for this long the coordinator itself did not listen.

        Those that were heard behind the stall have not been silent since.
        """
        for seen in self._seen.values():
            seen.heard_at_ms = min(now_ms, seen.heard_at_ms + stall_ms)

    def serves(self, group: Group) -> bool:
        """Say whether the group has all of the weights; else its rank waits for others."""
        return group.width >= self.narrowest

    def serves_whole(self, layout: Layout) -> bool:
        """Say whether there are groups, and each of them has all of the weights."""
        return bool(layout.groups) and all(map(self.serves, layout.groups))

    def is_degraded(self, rank: Rank) -> bool:
        """Say whether the rank may only serve alone: it has no peers, or closed its groups."""
        return self.widest > 1 and not self.has_peers(rank)

    def has_peers(self, rank: Rank) -> bool:
        """Say whether the rank can be in a wide group, and so share KV with others."""
        widths = self._seen[rank].hello.widths
        return any(self.supports(rank, width) for width in widths if width > 1)

    def is_one_cohort(self, ranks: Iterable[Rank]) -> bool:
        """Say whether those of the ranks that were heard share communicators."""
        cohorts = {self._seen[rank].hello.cohort for rank in ranks if rank in self._seen}
        return len(cohorts) <= 1

    def closed_by(self, ranks: Iterable[Rank]) -> Rank | None:
        """Return a member that has closed the group of exactly these ranks, if one has."""
        group = tuple(ranks)
        members = (rank for rank in group if rank in self._seen)
        return next((rank for rank in members if group in self._seen[rank].closed), None)

    def can_form(self, ranks: Iterable[Rank]) -> bool:
        """Say whether the ranks have communicators as a group, without being started again."""
        group = tuple(ranks)
        return self.is_one_cohort(group) and self.closed_by(group) is None

    @property
    def has_closed(self) -> bool:
        """Whether any group is closed."""
        return any(seen.closed for seen in self._seen.values())

    def supports(self, rank: Rank, width: int) -> bool:
        """Say whether the rank can be a member of its group of this width."""
        if width == 1:
            return True
        first = rank - rank % width
        peers = map(Rank, range(first, first + width))
        return width in self._seen[rank].hello.widths and self.can_form(peers)

    def can_compute(self, rank: Rank, width: int, mode: StepMode) -> bool:
        """Say whether the rank can compute steps of such groups in a mode."""
        return any(
            times.width == width and str(mode) in dict(times.curves)
            for times in self._seen[rank].hello.step_times
        )


def _order(report: Report) -> tuple[Stage, int]:
    return report.stage, report.sent_at_ms

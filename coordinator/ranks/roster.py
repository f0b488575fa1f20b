"""The state of each rank: its hello, its newest report, and when it was last heard.

Invariant: only messages of a rank's newest incarnation count, the newest report is kept, and
nothing from a process that has ended counts. The switcher, placement and the admin views call this
module; it decides nothing about layouts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from comm_pool.layout import Group, Layout, Rank, StepMode
from coordinator.model.weight_parts import WeightParts
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.terms import Stage
from coordinator.ranks.mode_quarantine import ModeQuarantine


class Arrival(Enum):
    """The meaning of a hello."""

    FIRST = auto()
    """The first hello of this rank."""
    AGAIN = auto()
    """The same process opened a new session."""
    RESTARTED = auto()
    """A new process took the rank's place; the old one's memory is gone."""
    STALE = auto()
    """A process older than the known one."""


@dataclass(slots=True)
class RankRecord:
    """The record of one rank, in its newest incarnation."""

    hello: RankHello
    heard_at_ms: int
    report: Report | None = None
    restarts: int = 0
    is_connected: bool = True
    has_exited: bool = False
    out_until_ms: int = 0
    """The process is ejected from all layouts until then."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Per gateway link, the number of the last break that was handled."""
    closed: frozenset[tuple[Rank, ...]] = frozenset()
    """Groups that the process can never form again."""

    @property
    def incarnation(self) -> int:
        """The newest incarnation."""
        return self.hello.incarnation


class Roster:
    """The ranks of a cell that were ever heard.

    Only ranks of one cohort can form wide groups. Where communicators end with a process, a cohort
    is the ranks that started together; where they lie in memory that outlives it, all ranks are
    one. A group whose formation a member has aborted stays unusable while that member's process
    lives.
    """

    __slots__ = ("_records", "guard", "narrowest", "parts", "widest", "world")

    def __init__(self, world: int, narrowest: int = 1, parts: WeightParts | None = None) -> None:
        self.world = world
        self.parts = parts or WeightParts()
        """Which part of the weights each rank holds."""
        self.narrowest = narrowest
        """The narrowest groups that can serve; ranks in narrower ones wait for others."""
        self._records: dict[Rank, RankRecord] = {}
        self.widest = 1
        """The widest group that any process supports."""
        self.guard = ModeQuarantine()
        """The probe results of their modes."""

    def __getitem__(self, rank: Rank) -> RankRecord:
        """Return the record of a rank that was heard."""
        return self._records[rank]

    def get(self, rank: Rank) -> RankRecord | None:
        """Return the record of a rank, or None if it was never heard."""
        return self._records.get(rank)

    def __contains__(self, rank: Rank) -> bool:
        """Return whether the rank was ever heard."""
        return rank in self._records

    def __iter__(self) -> Iterator[Rank]:
        """All ranks that were ever heard, ascending."""
        return iter(sorted(self._records))

    def on_hello(self, hello: RankHello, now_ms: int) -> Arrival:
        """Record a session's first message."""
        record = self._records.get(hello.rank)
        self.widest = max(self.widest, *hello.widths)
        if record is None:
            self._records[hello.rank] = RankRecord(hello, now_ms)
            return Arrival.FIRST
        is_older = hello.incarnation < record.incarnation
        if is_older or (record.has_exited and hello.incarnation == record.incarnation):
            return Arrival.STALE
        if hello.incarnation > record.incarnation:
            self.guard.renewed(hello.rank)
            self._records[hello.rank] = RankRecord(hello, now_ms, restarts=record.restarts + 1)
            return Arrival.RESTARTED
        record.hello = hello
        record.heard_at_ms = now_ms
        record.is_connected = True
        return Arrival.AGAIN

    def on_report(self, report: Report, now_ms: int) -> bool:
        """Record a report; return whether it came from the known incarnation and counts.

        An older report of the same process shows that it lives, but replaces nothing.
        """
        record = self._records.get(report.rank)
        if record is None or record.incarnation != report.incarnation or record.has_exited:
            return False
        record.heard_at_ms = now_ms
        record.closed = record.closed.union(report.closed)
        self.guard.take(report.probed)
        if record.report is None or _order(report) >= _order(record.report):
            record.report = report
        return True

    def take_cuts(self, report: Report) -> list[str]:
        """Return the addresses to which the rank's link broke since the last call."""
        record = self._records[report.rank]
        before, record.cuts = record.cuts, {each.reply_to: each.number for each in report.links}
        return [to for to, number in record.cuts.items() if number > before.get(to, 0)]

    def on_closed(self, rank: Rank, incarnation: int) -> None:
        """Record that a session ended; the process may live and come back."""
        record = self._records.get(rank)
        if record is not None and record.incarnation == incarnation:
            record.is_connected = False

    def on_exited(self, rank: Rank) -> None:
        """Record that the process ended; its messages still in flight no longer count."""
        record = self._records.get(rank)
        if record is not None:
            record.has_exited = True
            record.is_connected = False

    def exited(self) -> tuple[Rank, ...]:
        """Return the ranks whose newest known process has ended, ascending."""
        return tuple(rank for rank in self if self[rank].has_exited)

    def report_of(self, rank: Rank) -> Report | None:
        """Return the newest report of the known incarnation."""
        record = self._records.get(rank)
        return record.report if record else None

    def reported(self) -> tuple[Rank, ...]:
        """Return the ranks that have reported and whose process has not ended, ascending."""
        return tuple(rank for rank in self if self[rank].report and not self[rank].has_exited)

    def leases(self) -> dict[Rank, tuple[tuple[Rank, ...], ...]]:
        """Return the groups in whose leases each living rank had pages when its session began."""
        return {rank: self[rank].hello.leases for rank in self.reported()}

    def silent_since(self, rank: Rank, now_ms: int) -> int:
        """Return how long the rank has been silent, in milliseconds."""
        return now_ms - self._records[rank].heard_at_ms

    def is_out(self, rank: Rank, now_ms: int) -> bool:
        """Return whether to leave the rank out: it is ejected, or it computes wrongly."""
        return now_ms < self._records[rank].out_until_ms or self.guard.is_wrong(rank)

    def forgive(self, stall_ms: int, now_ms: int) -> None:
        """Move all silences' starts later: the coordinator did not listen for this long.

        Ranks heard after the stall have not been silent since.
        """
        for record in self._records.values():
            record.heard_at_ms = min(now_ms, record.heard_at_ms + stall_ms)

    def serves(self, group: Group) -> bool:
        """Return whether the group has all of the weights; else its ranks wait for others."""
        return group.width >= self.narrowest and self.lacking(group) is None

    def lacking(self, group: Group) -> int | None:
        """Return a part of the weights that the group lacks and can borrow of nobody, or None."""
        if not self.parts.borrows:
            return None
        sharing = self.parts.sharing_with(group.leader)
        return self.parts.lacking(group, [each for each in sharing if self._lends(each, group)])

    def _lends(self, rank: Rank, group: Group) -> bool:
        """Return whether the group's leader can read the rank's memory.

        It has mapped the memory of its cohort. A rank that was never heard may not have loaded its
        part, and on CUDA a process takes its memory with it.
        """
        lender, borrower = self._records.get(rank), self._records.get(group.leader)
        if lender is None or borrower is None or lender.hello.cohort != borrower.hello.cohort:
            return False
        return self.parts.outlive or not lender.has_exited

    def serves_whole(self, layout: Layout) -> bool:
        """Return whether there are groups, and each of them has all of the weights."""
        return bool(layout.groups) and all(map(self.serves, layout.groups))

    def is_degraded(self, rank: Rank) -> bool:
        """Return whether the rank can only serve alone, for lack of peers or communicators."""
        return self.widest > 1 and not self.has_peers(rank)

    def has_peers(self, rank: Rank) -> bool:
        """Return whether the rank can be in a wide group, and so share KV with others."""
        widths = self._records[rank].hello.widths
        return any(self.supports(rank, width) for width in widths if width > 1)

    def is_one_cohort(self, ranks: Iterable[Rank]) -> bool:
        """Return whether the ranks, as far as heard, share communicators."""
        cohorts = {self._records[rank].hello.cohort for rank in ranks if rank in self._records}
        return len(cohorts) <= 1

    def closed_by(self, ranks: Iterable[Rank]) -> Rank | None:
        """Return a member that has aborted a formation of exactly these ranks, or None."""
        group = tuple(ranks)
        members = (rank for rank in group if rank in self._records)
        return next((rank for rank in members if group in self._records[rank].closed), None)

    def can_form(self, ranks: Iterable[Rank]) -> bool:
        """Return whether the ranks have communicators as a group, without a restart."""
        group = tuple(ranks)
        return self.is_one_cohort(group) and self.closed_by(group) is None

    @property
    def has_closed(self) -> bool:
        """Whether any group is unusable after an aborted formation."""
        return any(record.closed for record in self._records.values())

    def supports(self, rank: Rank, width: int) -> bool:
        """Return whether the rank can be a member of its group of this width."""
        if width == 1:
            return True
        first = rank - rank % width
        peers = map(Rank, range(first, first + width))
        return width in self._records[rank].hello.widths and self.can_form(peers)

    def can_compute(self, rank: Rank, width: int, mode: StepMode) -> bool:
        """Return whether the rank can compute steps of such groups in a mode."""
        return any(
            times.width == width and str(mode) in dict(times.curves)
            for times in self._records[rank].hello.step_times
        )


def kv_tokens(hellos: Sequence[RankHello], width: int, stages: int = 1) -> int:
    """Return how many tokens the KV of a group of these ranks holds, with these pipeline stages."""
    # One page is vLLM's null block.
    pages = min(hello.pages_total for hello in hellos) - 1
    return pages * blocks_per_page(hellos[0], width, stages) * hellos[0].tokens_per_slot


def blocks_per_page(hello: RankHello, width: int, stages: int) -> int:
    """Return how many blocks of a group of this width one page of each member holds.

    Members that are more than the heads share them; those of other stages have other layers.
    """
    return stages * min(width // stages, hello.kv_heads)


def _order(report: Report) -> tuple[Stage, int]:
    return report.stage, report.sent_at_ms

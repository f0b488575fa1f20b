"""How long ranks copy KV for a switch before they leave their groups, and into how many pages.

While groups serve, ranks copy full blocks of running tasks, round by round: in each one what has
become full since. The last rounds bring little, so their number, bytes and time are bounded.
Invariant: pages are granted only of what a group has free, and never more than half of that at
once. A rank whose order ends gives them back or takes them along. The switcher calls this module.
"""

from collections.abc import Collection

from comm_pool.layout import Group, Rank
from coordinator.protocol.messages.rank import Grant, PreCopyOrder, Report
from coordinator.protocol.terms import Target
from coordinator.ranks.roster import Roster, blocks_per_page

ROUNDS_MAX = 4
"""Rounds of a switch in which ranks copy, at most."""

BYTES_MAX = 256 << 30
"""KV bytes pulled for a switch before the groups are left: no round begins after that."""

LIMIT_MS = 2_000
"""How long groups serve on for early copies, at most."""

REST_BYTES = 8 << 20
"""A round that pulled no more is the last that copies: less than 1 ms over PCIe is left."""

FREE_SHARE = 2
"""A round sets aside at most 1/2 of a group's free pages: its tasks grow."""

UNEVEN_SHARE = 4
"""Pages for 1/4 more than an even part of the KV are granted: groups get whole tasks."""


class PreCopy:
    """The early copies of the current switch."""

    __slots__ = (
        "_began_ms",
        "_bytes_before",
        "_copying",
        "_done",
        "_epoch",
        "_granted",
        "_roster",
        "_target",
        "drafted",
        "order",
    )

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.order: PreCopyOrder | None = None
        """What changing groups are asked to copy; None: nothing."""
        self.drafted = 0
        """The round that drafted the plan, which all ranks have finished; 0: there is none."""
        self._epoch = 0
        self._target = Target(())
        self._began_ms = 0
        self._bytes_before = 0
        """The bytes of the rounds before this one."""
        self._copying = 0
        """The newest round in which ranks copy."""
        self._granted: dict[Group, int] = {}
        """The old groups, and the pages granted to each."""
        self._done: dict[Rank, tuple[int, int]] = {}
        """The round that each rank has finished, and its bytes by then."""

    def start(self, epoch: int, target: Target, alive: Collection[Rank], now_ms: int) -> None:
        """Begin the first round, if KV of running tasks is to move and all their groups serve."""
        reports = [self._roster.report_of(rank) for rank in alive]
        bindings = {each.binding for each in reports if each is not None}
        if None in bindings or None in reports:
            return
        old = {each.group for each in bindings if each and each not in target.bindings}
        if not all(set(group.ranks).issubset(alive) for group in old):
            return
        if not any(self._moves(group, target) for group in old):
            return
        self._epoch, self._target, self._began_ms = epoch, target, now_ms
        self._granted = dict.fromkeys(old, 0)
        self._done = {rank: (0, 0) for group in old for rank in group.ranks}
        self._begin(1)

    def _moves(self, group: Group, target: Target) -> bool:
        """Return whether other ranks get KV of a group's tasks."""
        report, binding = self._roster.report_of(group.leader), target.binding_of(group.leader)
        is_same = binding is not None and binding.group.lease_key == group.lease_key
        return report is not None and report.running > 0 and not is_same

    def stop(self) -> None:
        """Ask for no more: ranks have left their groups, or another layout is wanted."""
        self.order, self.drafted = None, 0

    def look(self, now_ms: int) -> bool:
        """Begin the next round or end if it is time; return whether the order has changed."""
        order = self.order
        if order is None:
            return False
        is_late, are_done = now_ms - self._began_ms >= LIMIT_MS, self._hear(order.round)
        if not (is_late or are_done):
            return False
        if is_late or order.drafts:
            self.order = None
            self.drafted = order.round if order.drafts and are_done else 0
        else:
            is_last = order.round == ROUNDS_MAX or not self._is_worth_more()
            self._begin(order.round + 1, drafts=is_last)
        return True

    @property
    def rounds(self) -> int:
        """The rounds that all ranks have finished, without the one that drafts."""
        return min(self._finished, self._copying)

    @property
    def _finished(self) -> int:
        return min((number for number, _ in self._done.values()), default=0)

    @property
    def bytes(self) -> int:
        """KV bytes that ranks have pulled from others."""
        return sum(copied for _, copied in self._done.values())

    def took_ms(self, now_ms: int) -> int:
        """Return the time since the first round began."""
        return now_ms - self._began_ms

    def _hear(self, number: int) -> bool:
        """Take in the ranks' reports; return whether all have finished this round."""
        before = self._done
        reports = {rank: self._roster.report_of(rank) for rank in before}
        self._done = {
            rank: max(before[rank], _progress(report, self._epoch))
            for rank, report in reports.items()
        }
        return self._finished >= number

    def _is_worth_more(self) -> bool:
        last_round = self.bytes - self._bytes_before
        return last_round > REST_BYTES and self.bytes < BYTES_MAX

    def _begin(self, number: int, *, drafts: bool = False) -> None:
        self._bytes_before = self.bytes
        if drafts:
            given = self.order.grants if self.order is not None else ()
            self.order = PreCopyOrder(number, given, drafts=True)
            return
        self._copying = number
        self._granted = {
            group: min(self._needed(group), granted + self._free(group) // FREE_SHARE)
            for group, granted in self._granted.items()
        }
        grants = [Grant(group.ranks, pages) for group, pages in self._granted.items()]
        self.order = PreCopyOrder(number, tuple(sorted(grants, key=lambda each: each.ranks)))

    def _free(self, group: Group) -> int:
        report = self._roster.report_of(group.leader)
        return report.blocks_free // self._per_page(group) if report is not None else 0

    def _needed(self, group: Group) -> int:
        """Return the pages of each member that hold its part of what will lie there."""
        binding = self._target.binding_of(group.leader)
        wider = binding is not None and binding.group.width > group.width
        span = set(binding.group.ranks if binding is not None and wider else group.ranks)
        pages = sum(
            each.width * self._used(each) for each in self._granted if span.issuperset(each.ranks)
        )
        even = -(-pages // len(span))
        return even + even // UNEVEN_SHARE + 1

    def _used(self, group: Group) -> int:
        report = self._roster.report_of(group.leader)
        if report is None:
            return 0
        return -(-(report.blocks_total - report.blocks_free) // self._per_page(group))

    def _per_page(self, group: Group) -> int:
        return blocks_per_page(self._roster[group.leader].hello, group.width, group.stages)


def _progress(report: Report | None, epoch: int) -> tuple[int, int]:
    progress = report.precopy if report is not None else None
    is_of_epoch = progress is not None and progress.epoch == epoch
    return (progress.round, progress.bytes) if progress and is_of_epoch else (0, 0)

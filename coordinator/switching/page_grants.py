"""How many pages each serving group was given.

Invariant: a group is granted once per formation, as many pages as every member had free, so all
its members lease the same number. Behind a move that is what they have free when they have heard
that it is committed. Called by the switcher.
"""

from collections.abc import Iterable

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Grant, Report
from coordinator.protocol.terms import Binding, Phase
from coordinator.ranks.roster import Roster

REGRANT_SHARE = 4
"""A group is formed anew for pages that add more than 1/4 to its grant."""


class PageGrants:
    """The grants of the groups that reached SERVE."""

    __slots__ = ("_granted", "_roster")

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._granted: dict[Binding, Grant] = {}

    def __contains__(self, binding: Binding) -> bool:
        """Say whether the group was granted its pages."""
        return binding in self._granted

    def add(self, binding: Binding) -> None:
        """Grant what every member has free."""
        self._granted[binding] = Grant(binding.group.ranks, self._free_pages(binding))

    def resume(self, binding: Binding) -> None:
        """Take up a group that serves already: what every member has handed to it, or more."""
        reports = [self._roster.report_of(rank) for rank in binding.group.ranks]
        pages = [report.pages for report in reports if report]
        held = min(each.owned + each.leased for each in pages)
        self._granted[binding] = Grant(binding.group.ranks, held)

    def drop(self, binding: Binding) -> None:
        """The group is gone."""
        self._granted.pop(binding, None)

    def of(self, bindings: Iterable[Binding]) -> tuple[Grant, ...]:
        """Return the grants of these groups, all of which have one."""
        return tuple(self._granted[binding] for binding in bindings)

    def all_of(self) -> set[Binding]:
        """Return the groups that have one."""
        return set(self._granted)

    def starved(self) -> tuple[Rank, ...]:
        """Return the leaders of groups that would gain much by forming anew.

        A group gets pages only when it is formed; what paused tasks kept then may be free by now.
        Few are not worth a formation, unless the only task that runs has all that the group has:
        no other can be preempted for it.
        """
        return tuple(
            binding.group.leader
            for binding, grant in self._granted.items()
            if (free := self._free_pages(binding)) * REGRANT_SHARE > grant.pages
            or (free and self._is_full(binding))
        )

    def _is_full(self, binding: Binding) -> bool:
        report = self._roster.report_of(binding.group.leader)
        if report is None or report.binding != binding:
            return False
        return report.running == 1 and report.blocks_free == 0

    def _free_pages(self, binding: Binding) -> int:
        return min(_free(self._roster.report_of(rank)) for rank in binding.group.ranks)


def _free(report: Report | None) -> int:
    if report is None:
        return 0
    return report.free_pages_after_commit if report.stage.phase is Phase.MOVE else report.pages.free

"""How many pages each serving group was granted.

Invariant: a group is granted pages once per formation, as many as every member has free, so all
members lease the same number, however many pages each has. After a migration that is what they have
free once they have heard of its commit. The switcher calls this module.
"""

from collections.abc import Iterable

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Grant, Report
from coordinator.protocol.terms import Binding, Phase
from coordinator.ranks.roster import Roster, blocks_per_page

REGRANT_SHARE = 4
"""A group is formed anew if free pages would add more than 1/4 to its grant."""


class PageGrants:
    """The grants of the groups that reached SERVE."""

    __slots__ = ("_granted", "_roster")

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._granted: dict[Binding, Grant] = {}

    def __contains__(self, binding: Binding) -> bool:
        """Return whether the group was granted its pages."""
        return binding in self._granted

    def add(self, binding: Binding) -> None:
        """Grant as many pages as every member has free."""
        self._granted[binding] = Grant(binding.group.ranks, self._free_pages(binding))

    def resume(self, binding: Binding) -> None:
        """Adopt a group that serves already: grant the least that any member holds."""
        reports = [self._roster.report_of(rank) for rank in binding.group.ranks]
        pages = [report.pages for report in reports if report]
        held = min(each.owned + each.leased for each in pages)
        self._granted[binding] = Grant(binding.group.ranks, held)

    def drop(self, binding: Binding) -> None:
        """Forget the grant of a group that is gone."""
        self._granted.pop(binding, None)

    def of(self, bindings: Iterable[Binding]) -> tuple[Grant, ...]:
        """Return the grants of these groups, all of which have one."""
        return tuple(self._granted[binding] for binding in bindings)

    def all_of(self) -> set[Binding]:
        """Return the groups that have a grant."""
        return set(self._granted)

    def starved(self) -> tuple[Rank, ...]:
        """Return the leaders of groups that would gain much by forming anew.

        A group gets pages only when it is formed; pages that paused tasks retained then may be free
        by now. A few pages are not worth a formation, unless the group's only running task uses all
        its blocks: no other task can be preempted for it.
        """
        return tuple(
            binding.group.leader
            for binding, grant in self._granted.items()
            if (free := self._free_pages(binding)) * REGRANT_SHARE > grant.pages
            or (free and self._is_full(binding))
        )

    def blocks_to_gain(self, binding: Binding) -> int:
        """Return how many blocks a group that has a grant would gain by forming anew."""
        hello = self._roster[binding.group.leader].hello
        group = binding.group
        return self._free_pages(binding) * blocks_per_page(hello, group.width, group.stages)

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

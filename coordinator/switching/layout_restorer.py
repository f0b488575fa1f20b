"""Restores the wanted layout after a loss. Pure; the core calls it at each tick.

A lost rank comes back in dp. Two things may stand between that and the layout before the loss: the
layout must be wanted again, and on CUDA ranks that were not started together have no communicators,
and survivors of a loss have aborted theirs. Then all ranks must restart together, which is free
while the cell is idle. In a busy cell the ranks of one group restart while the others serve.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from comm_pool.layout import Group, Layout, Mode, Rank, format_layout
from comm_pool.plan import communicator_plan
from coordinator.model.events import Effect, ToLauncher, note
from coordinator.model.records import Decision
from coordinator.protocol.messages.launcher import RenewRanks
from coordinator.protocol.terms import Carry
from coordinator.ranks.layout_check import why_unreachable
from coordinator.ranks.roster import Roster
from coordinator.switching.switcher import Switcher

RESTORATION = "restored"
"""Cause of a switch back to the layout that was wanted before a loss."""

RENEWALS_APART_MS = 300_000
"""Least time between two restarts of the same ranks, whatever the first one led to."""


class _Debounce:
    """How long a condition has held."""

    __slots__ = ("_since_ms",)

    def __init__(self) -> None:
        self._since_ms: int | None = None

    def is_over(self, limit_ms: int, now_ms: int, *, is_true: bool) -> bool:
        """Return whether the condition has held at every call for `limit_ms`."""
        if not is_true:
            self._since_ms = None
            return False
        if self._since_ms is None:
            self._since_ms = now_ms
        return now_ms - self._since_ms >= limit_ms


@dataclass(frozen=True, slots=True)
class RenewalTimes:
    """How long groups must lack communicators before their ranks restart; 0 is never."""

    idle_ms: int
    """For all ranks, once the cell has had no task for this long."""
    busy_ms: int
    """For the ranks of one group, under any load."""


class LayoutRestorer:
    """The layout that was decided last, and how to restore it.

    Where a policy decides (`is_fixed` is False), the policy finds out which groups can form, and
    this class only requests restarts. A layout is restored once it has been possible for
    `settled_ms`: ranks come back one by one, and some are soon lost again.
    """

    __slots__ = (
        "_initial",
        "_is_fixed",
        "_lacking",
        "_lacking_idle",
        "_possible",
        "_renew",
        "_renewed",
        "_settled_ms",
        "_wanted",
    )

    def __init__(
        self, initial: Layout, settled_ms: int, renew: RenewalTimes, *, is_fixed: bool
    ) -> None:
        self._initial = initial
        self._wanted: Layout | None = None
        self._settled_ms = settled_ms
        self._renew = renew
        self._renewed: dict[tuple[Rank, ...], int] = {}
        """When these ranks last restarted."""
        self._is_fixed = is_fixed
        self._possible = _Debounce()
        self._lacking = _Debounce()
        self._lacking_idle = _Debounce()

    def decided(self, layout: Layout) -> None:
        """This layout is wanted from now on."""
        self._wanted = layout
        self._possible = _Debounce()

    def layout_due(self, switcher: Switcher, roster: Roster, now_ms: int) -> Layout | None:
        """Return the layout that was decided, if the cell has left it and can form it again."""
        if switcher.recovering or not self._is_fixed:
            return None
        if self._wanted is None:
            # After a coordinator restart, the layout that the ranks last heard counts as wanted,
            # unless ranks only waited for each other in it.
            last_layout = switcher.served_layout
            self._wanted = last_layout if roster.serves_whole(last_layout) else self._initial
        wanted = _completed(self._wanted, self._initial, roster)
        differs = switcher.is_serving and switcher.target.layout != wanted
        can_be = differs and why_unreachable(wanted, roster, switcher.alive) is None
        return wanted if self._possible.is_over(self._settled_ms, now_ms, is_true=can_be) else None

    def renewal_due(
        self, switcher: Switcher, roster: Roster, now_ms: int, *, is_idle: bool
    ) -> tuple[Rank, ...]:
        """Return the ranks to restart together; empty if there are none.

        All ranks must be present and serving, but unable to form a wanted group.
        """
        idle_ms, busy_ms = self._renew.idle_ms, self._renew.busy_ms
        if switcher.recovering or not (idle_ms or busy_ms):
            return ()
        serves_whole = switcher.is_serving and len(switcher.alive) == roster.world
        lacking = self._lacking_groups(switcher, roster) if serves_whole else []
        parts = [each for each in lacking if len(each) < roster.world]
        is_idle = self._lacking_idle.is_over(idle_ms, now_ms, is_true=is_idle and bool(lacking))
        is_busy = self._lacking.is_over(busy_ms, now_ms, is_true=bool(parts))
        wanted = [tuple(roster)] if idle_ms and is_idle else parts if busy_ms and is_busy else []
        due = next((each for each in wanted if self._may_renew(each, now_ms)), ())
        if due:
            self._renewed[due] = now_ms
            self._lacking, self._lacking_idle = _Debounce(), _Debounce()  # One restart at a time.
        return due

    def _may_renew(self, ranks: tuple[Rank, ...], now_ms: int) -> bool:
        last_ms = self._renewed.get(ranks)
        return last_ms is None or now_ms - last_ms >= RENEWALS_APART_MS

    def _lacking_groups(self, switcher: Switcher, roster: Roster) -> list[tuple[Rank, ...]]:
        """Return rank sets that cannot form a group that is wanted or that the policy may want."""
        if self._is_fixed and self._wanted is not None:
            groups: Iterable[tuple[Rank, ...]] = (each.ranks for each in self._wanted.groups)
        elif roster.has_closed or not roster.is_one_cohort(switcher.alive):
            widths = {*(w for rank in roster for w in roster[rank].hello.widths), roster.widest}
            groups = communicator_plan(
                roster.world, [width for width in widths if roster.world % width == 0]
            )
        else:
            groups = ()
        return [ranks for ranks in groups if not roster.can_form(ranks)]


def _completed(layout: Layout, initial: Layout, roster: Roster) -> Layout:
    """Add groups for ranks that cannot serve alone and were away when the layout was decided.

    A group of the initial layout if all its ranks are free, else one of the narrowest width.
    """
    if (width := roster.narrowest) == 1:
        return layout
    blocks = communicator_plan(roster.world, (width,))
    for group in (*initial.groups, *(Group(ranks, Mode.TP) for ranks in blocks)):
        if set(layout.ranks).isdisjoint(group.ranks):
            layout = Layout((*layout.groups, group))
    return layout


def restoration(layout: Layout, carry: Carry, now_ms: int) -> Decision:
    """Return the decision to restore the layout."""
    reason = "the cell can form this layout again after a loss"
    return Decision(now_ms, format_layout(layout), carry, reason, cause=RESTORATION)


def renewal(roster: Roster, ranks: Iterable[Rank], cause: str) -> list[Effect]:
    """Ask the launcher to restart the processes of these ranks together."""
    known = tuple((rank, roster[rank].incarnation) for rank in ranks if rank in roster)
    entry = note("renewal_wanted", ranks=[rank for rank, _ in known], cause=cause)
    return [entry, ToLauncher(RenewRanks(known))]

"""Turns a layout into a target, and judges ranks and groups against it.

The switcher calls this module.
"""

from collections.abc import Collection, Mapping

from comm_pool.layout import Layout, Rank
from coordinator.protocol.messages.rank import Report
from coordinator.protocol.terms import Binding, Phase, Stage, Target
from coordinator.ranks.roster import Roster


def bind(
    layout: Layout,
    previous: Target,
    epoch: int,
    fresh: Collection[Rank],
    reserved: Mapping[Rank, int],
) -> Target:
    """Return the layout's groups; those of `previous` keep their formation unless a rank is fresh.

    New formations get the number `epoch`. `reserved` maps leaders to the number of the most urgent
    tiers that their groups are for.
    """
    stays = {
        binding.group: binding
        for binding in previous.bindings
        if not set(fresh).intersection(binding.group.ranks)
    }
    return Target(
        tuple(stays[group] if group in stays else Binding(group, epoch) for group in layout.groups),
        tuple(sorted(reserved.items())),
    )


def void(report: Report, target: Target, roster: Roster) -> int:
    """Return the formation that a rank is joined to, if no leader will lead it; else 0.

    A leader gets SERVE only after it has reported that it joined, or that it has its share of a
    migration into the formation. So a leader whose last report says neither has never served the
    formation, or has left it. No leave message is needed then, and if it never served, none will
    come.
    """
    joined = report.binding
    if joined is None or joined in target.bindings:
        return 0
    leader = roster.report_of(joined.group.leader)
    return joined.formation if leader is not None and not _may_serve(leader, joined) else 0


def _may_serve(leader: Report, binding: Binding) -> bool:
    """Return whether the leader serves the group, or may have got SERVE since this report."""
    moved_to = leader.target if leader.stage.phase is Phase.MOVE else None
    return leader.binding == binding or (moved_to is not None and binding in moved_to.bindings)


def have_joined(binding: Binding, roster: Roster) -> bool:
    """Return whether every member has reported that it is joined to the group."""
    reports = map(roster.report_of, binding.group.ranks)
    return all(report is not None and report.binding == binding for report in reports)


def is_foreign(report: Report, target: Target, epoch: int) -> bool:
    """Return whether the rank acknowledged something that this coordinator never sent."""
    if report.stage.epoch == epoch:
        return report.target != target
    return report.stage.epoch > epoch


def staying(
    previous: Target, target: Target, roster: Roster, known: Collection[Binding]
) -> frozenset[Binding]:
    """Return the groups of both targets that all members have reported to serve.

    Nothing is asked of them until a later target. `known` are those that stayed before: a member's
    last report may be about a stage between.
    """
    both = set(previous.bindings).intersection(target.bindings)
    return frozenset(
        each
        for each in both
        if have_joined(each, roster) and (each in known or _serve(each, roster))
    )


def _serve(binding: Binding, roster: Roster) -> bool:
    """Return whether the last reports of its members, who have joined it, acknowledge SERVE."""
    reports = map(roster.report_of, binding.group.ranks)
    return all(report is not None and report.stage.phase is Phase.SERVE for report in reports)


def who_is_late(
    roster: Roster,
    alive: Collection[Rank],
    stage: Stage,
    target: Target,
    stay: Collection[Binding],
) -> dict[Rank, Binding | None]:
    """Return the ranks that have not acknowledged the stage, with the group each is joined to.

    Groups that `stay` go on: a rank of one acknowledges between two steps, which may take long, and
    no one needs that.
    """
    reports = {rank: roster.report_of(rank) for rank in alive}
    return {
        rank: report.binding if report is not None else None
        for rank, report in reports.items()
        if report is None
        or (report.binding not in stay and (report.stage < stage or report.target != target))
    }

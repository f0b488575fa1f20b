"""How a coordinator that just started continues from the ranks' reports.

If all ranks agree, it adopts their layout and epoch as they are, and they serve on. Otherwise it
continues the highest layout that any rank acknowledged in a new epoch, without the ranks that are
gone. The switcher calls this module.
"""

from dataclasses import dataclass

from comm_pool.layout import Layout, Rank
from coordinator.protocol.messages.rank import Report
from coordinator.protocol.terms import Binding, Phase, Stage, Target
from coordinator.ranks.roster import Roster


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where to continue: the ranks' target and stage, and the layout to have from now on."""

    target: Target
    stage: Stage
    layout: Layout
    serving: tuple[Binding, ...]
    """The groups all of whose members serve; they need not stop."""
    gone: tuple[Rank, ...]
    """Ranks whose memory is lost: silent, or newly started."""
    cause: str

    @property
    def is_settled(self) -> bool:
        """Every rank serves the wanted layout; there is nothing to do."""
        return (
            self.stage.phase is Phase.SERVE
            and self.layout == self.target.layout
            and self.serving == self.target.bindings
        )


def resume(roster: Roster, initial: Layout, *, is_late: bool) -> Resumed | None:
    """Judge the reports; None while it is better to wait for more.

    `is_late`: a rank not heard by now has stopped by itself, because its time lease is over.
    """
    reports = {rank: roster[rank].report for rank in roster.reported()}
    heard = {rank: report for rank, report in reports.items() if report is not None}
    exited = roster.exited()
    if not heard or (len(heard) + len(exited) < roster.world and not is_late):
        return None
    best = max(heard.values(), key=lambda report: report.stage)
    target = best.target
    if target is None:
        missing = set(initial.ranks).difference(heard)
        layout = _possible(initial.without(missing), roster)
        return Resumed(Target(()), best.stage, layout, (), (), "start")
    gone = tuple(
        rank
        for rank in map(Rank, range(roster.world))
        if rank not in heard or heard[rank].stage.epoch == 0
    )
    return Resumed(
        target=target,
        stage=best.stage,
        layout=_possible(target.layout.without(gone).plus(heard), roster),
        serving=tuple(binding for binding in target.bindings if _serves(binding, target, heard)),
        gone=gone,
        cause="coordinator restarted",
    )


def _possible(layout: Layout, roster: Roster) -> Layout:
    """Let ranks serve alone if their group cannot be formed, as they did not start together."""
    for group in layout.groups:
        if not all(roster.supports(rank, group.width) for rank in group.ranks):
            layout = layout.without(group.ranks).plus(group.ranks)
    return layout


def _serves(binding: Binding, target: Target, heard: dict[Rank, Report]) -> bool:
    return all(
        rank in heard
        and heard[rank].binding == binding
        and heard[rank].target == target
        and heard[rank].stage.phase is Phase.SERVE
        for rank in binding.group.ranks
    )

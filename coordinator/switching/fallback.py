"""What follows when modes drift: the target falls back to a layout that does without them. Pure.

Tasks of the groups that change are computed anew from the tokens that they have, so that nothing
stays of what the mode computed but the tokens that clients have seen. The same becomes of a group
that a member has closed, to get out of an earlier formation, when it was to be formed again
already. Called by the core behind every event.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from comm_pool.layout import Layout, Rank, format_layout
from coordinator.model.events import Effect, note, warning
from coordinator.model.records import Decision
from coordinator.protocol.terms import Carry
from coordinator.ranks.roster import Roster
from coordinator.switching.switcher import Switcher

GUARD = "guard"
"""The cause of a switch that leaves a mode which has drifted."""

CLOSED = "closed"
"""The cause of a switch that does without a group which a member has closed."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """What to say, which ranks were left out, and the decision, if another layout is wanted."""

    notes: tuple[Effect, ...] = ()
    left_out: tuple[Rank, ...] = ()
    decision: Decision | None = None


def fall_back(switcher: Switcher, roster: Roster, now_ms: int) -> Fallen:
    """Retarget the switcher to what is left of its layout, if anything of it is barred."""
    guard = roster.guard
    if switcher.recovering or not (guard.barred or roster.has_closed):
        return Fallen()
    notes = tuple(_notes(roster))
    wanted = switcher.target.layout
    can_be = _without_closed(wanted, roster)
    left = guard.remaining(can_be, roster.narrowest)
    wrong = tuple(rank for rank in switcher.alive if rank not in left.ranks)
    if left == wanted:
        return Fallen(notes)
    if wrong:
        switcher.lose(wrong, now_ms, "computes wrongly")
    cause = CLOSED if left == can_be else GUARD
    switcher.retarget(left, Carry.RECOMPUTE, cause, now_ms)
    reason = (
        "a member has closed its group, as another one was lost"
        if cause == CLOSED
        else "out of service: " + ", ".join(sorted(guard.modes_out()))
    )
    choice = format_layout(left, roster.world)
    decision = Decision(now_ms, choice, Carry.RECOMPUTE, reason, cause=cause)
    return Fallen(notes, wrong, decision)


def _without_closed(layout: Layout, roster: Roster) -> Layout:
    """Let the members of closed groups serve alone."""
    for group in layout.groups:
        if roster.closed_by(group.ranks) is not None:
            layout = layout.without(group.ranks).plus(group.ranks)
    return layout


def put_back(roster: Roster, mode: str) -> list[Effect]:
    """Let a mode serve again, as an operator asks; it is probed again if it is formed."""
    if roster.guard.put_back(mode):
        return [note("mode_put_back", mode=mode)]
    return [warning("mode_not_out", mode=mode)]


def _notes(roster: Roster) -> Iterator[Effect]:
    for each in roster.guard.take_unsaid():
        yield warning(
            "mode_out_of_service",
            mode=each.mode,
            ranks=each.ranks,
            error_nats=each.error_nats,
            error_max_nats=each.error_max_nats,
        )

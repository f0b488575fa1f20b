"""Retargets the switcher when modes drift or a member has aborted a formation. Pure.

The new layout does without the quarantined modes. Tasks of the groups that change are recomputed
from their tokens, so nothing that a drifted mode computed survives except tokens that clients have
seen. The same applies to a group that a member aborted while it was about to form again. The core
calls this module after every event.
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
"""Cause of a switch away from a mode that has drifted."""

CLOSED = "closed"
"""Cause of a switch away from a group that a member has aborted."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Notes to log, ranks that computed wrongly, and the decision if the layout has to change."""

    notes: tuple[Effect, ...] = ()
    wrong: tuple[Rank, ...] = ()
    decision: Decision | None = None


def fall_back(switcher: Switcher, roster: Roster, now_ms: int) -> Fallback:
    """Retarget the switcher if its layout holds a quarantined mode or an aborted group."""
    guard = roster.guard
    if switcher.recovering or not (guard.barred or roster.has_closed):
        return Fallback()
    notes = tuple(_notes(roster))
    wanted = switcher.target.layout
    can_be = _without_closed(wanted, roster)
    replacement = guard.remaining(can_be, roster.narrowest)
    wrong = tuple(rank for rank in switcher.alive if rank not in replacement.ranks)
    if replacement == wanted:
        return Fallback(notes)
    if wrong:
        switcher.lose(wrong, now_ms, "computes wrongly")
    cause = CLOSED if replacement == can_be else GUARD
    switcher.retarget(replacement, Carry.RECOMPUTE, cause, now_ms)
    reason = (
        "a member aborted its group after another one was lost"
        if cause == CLOSED
        else "out of service: " + ", ".join(sorted(guard.modes_out()))
    )
    choice = format_layout(replacement, roster.world)
    decision = Decision(now_ms, choice, Carry.RECOMPUTE, reason, cause=cause)
    return Fallback(notes, wrong, decision)


def _without_closed(layout: Layout, roster: Roster) -> Layout:
    """Let the members of aborted groups serve alone."""
    for group in layout.groups:
        if roster.closed_by(group.ranks) is not None:
            layout = layout.without(group.ranks).plus(group.ranks)
    return layout


def put_back(roster: Roster, mode: str) -> list[Effect]:
    """Reinstate a mode on an operator's request; it is probed again if it is formed."""
    if roster.guard.put_back(mode):
        return [note("mode_put_back", mode=mode)]
    return [warning("mode_not_out", mode=mode)]


def _notes(roster: Roster) -> Iterator[Effect]:
    for each in roster.guard.take_unreported():
        yield warning(
            "mode_out_of_service",
            mode=each.mode,
            ranks=each.ranks,
            error_nats=each.error_nats,
            error_max_nats=each.error_max_nats,
        )

"""Moves tasks away from a leader that lost its link to their gateway. Pure.

Placement puts no task on the link until the leader reports that it works again. The core calls this
module for every report that counts.
"""

from coordinator.model.events import Effect, warning
from coordinator.protocol.messages.rank import Report
from coordinator.ranks.roster import Roster
from coordinator.tasks.task_pool import TaskPool


def take_up_cut(report: Report, roster: Roster, pool: TaskPool, now_ms: int) -> list[Effect]:
    """Take back the tasks whose last tokens may be lost on newly broken links."""
    effects: list[Effect] = []
    for reply_to in roster.take_cuts(report):
        if asked := pool.cut_off(report.rank, reply_to, now_ms):
            effects += [warning("link_cut", rank=report.rank, reply_to=reply_to), *asked]
    return effects

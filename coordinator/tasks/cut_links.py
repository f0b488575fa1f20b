"""What follows when a leader has lost its link to a gateway: its tasks of it go on elsewhere. Pure.

Nothing is placed over the link until the leader says that it holds again; see `placement`. Called
by the core for every report that counts.
"""

from coordinator.model.events import Effect, warning
from coordinator.protocol.messages.rank import Report
from coordinator.ranks.roster import Roster
from coordinator.tasks.task_pool import TaskPool


def take_up_cut(report: Report, roster: Roster, pool: TaskPool, now_ms: int) -> list[Effect]:
    """Ask for the tasks whose last tokens may have been lost on links that broke since."""
    effects: list[Effect] = []
    for reply_to in roster.take_cuts(report):
        if asked := pool.cut_off(report.rank, reply_to, now_ms):
            effects += [warning("link_cut", rank=report.rank, reply_to=reply_to), *asked]
    return effects

"""Which moves of KV are committed, and who leads what from then on.

Invariant: a move is committed once, in the step in which its tasks change their leader, and only
if every rank that took part copied its share; a rank that reads of a later stage compares its own
epoch with `committed` and knows. Called by the switcher.
"""

from collections.abc import Iterable

from comm_pool.layout import Rank
from coordinator.protocol.messages import Adopted, Report


class Moves:
    """The last move and its outcome."""

    __slots__ = ("_adopted", "committed", "movers")

    def __init__(self) -> None:
        self.committed = 0
        """The last epoch whose move was committed."""
        self.movers: tuple[Rank, ...] = ()
        """The parked ranks that take part in the move of this epoch."""
        self._adopted: list[tuple[Rank, Adopted]] = []

    def start(self, reports: Iterable[Report | None]) -> bool:
        """Let the parked ranks take part; False if there are none, so that nothing can move."""
        self.movers = tuple(each.rank for each in reports if each and each.binding is None)
        return bool(self.movers)

    def decide(self, epoch: int, reports: Iterable[Report | None]) -> None:
        """Commit the move, unless a rank could not copy its share: then nobody gives anything up.

        `reports` are those of the movers, in which they acknowledge the move.
        """
        given = list(reports)
        if any(report is None or report.has_failed for report in given):
            return
        self.committed = epoch
        self._adopted += [
            (report.rank, adopted) for report in given if report for adopted in report.adopted
        ]

    def take_adopted(self) -> list[tuple[Rank, Adopted]]:
        """Return the tasks that changed their leader since the last call, with the new one."""
        adopted, self._adopted = self._adopted, []
        return adopted

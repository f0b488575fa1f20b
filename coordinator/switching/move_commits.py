"""Which moves of KV are committed, and who leads what from then on.

Invariant: a move is committed once, in the step in which its tasks change their leader, and only
if every rank that took part copied its share, or is lost with the groups that it shares if it does
not; a rank that reads of a later stage compares the epoch of its move with what it is told was
committed, and knows. Called by the switcher.
"""

from collections import deque
from collections.abc import Iterable

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.terms import Binding

COMMITTED_REMEMBERED = 1_024
"""Committed moves that are remembered: a rank that was cut out during one asks for it later."""


class MoveCommits:
    """The last move and its outcome."""

    __slots__ = ("_adopted", "_committed", "_offered", "_told", "movers")

    def __init__(self) -> None:
        self._committed: deque[int] = deque(maxlen=COMMITTED_REMEMBERED)
        self._offered: dict[Rank, RankHello] = {}
        """What ranks would go on with, until recovery knows whether they do."""
        self._told = 0, 0
        """The epoch of the latest directive that any rank told of, and the move committed by it."""
        self.movers: tuple[Rank, ...] = ()
        """The parked ranks that take part in the move of this epoch."""
        self._adopted: list[tuple[Rank, Adopted]] = []

    def start(self, reports: Iterable[Report | None]) -> bool:
        """Let the parked ranks take part; False if there are none, so that nothing can move."""
        self.movers = tuple(each.rank for each in reports if each and each.binding is None)
        return bool(self.movers)

    def cover(self, bindings: Iterable[Binding]) -> bool:
        """Say whether all ranks of these groups take part."""
        return all(set(each.group.ranks).issubset(self.movers) for each in bindings)

    def decide(self, epoch: int, reports: Iterable[Report | None]) -> bool:
        """Commit the move, unless a rank could not copy its share: then nobody gives anything up.

        `reports` are those of the movers, in which they acknowledge the move. Returns whether it is
        committed.
        """
        given = list(reports)
        if any(report is None or report.has_failed for report in given):
            return False
        self._committed.append(epoch)
        self._adopted += [
            (report.rank, adopted) for report in given if report for adopted in report.adopted
        ]
        return True

    def on_hello(self, hello: RankHello) -> None:
        """Take what a rank goes on with if an earlier coordinator committed its move."""
        self._offered[hello.rank] = hello

    def on_report(self, report: Report) -> None:
        """Take what an earlier coordinator told; it stays true when the process has ended."""
        self._told = max(self._told, (report.heard_in_epoch, report.moved))

    def recover(self) -> None:
        """Take it that an earlier coordinator committed no later move than any rank was told of.

        A move that no rank was told of has not been carried out by any.
        """
        epoch = self._told[1]
        self._committed.append(epoch)
        for rank, hello in sorted(self._offered.items()):
            if hello.adopted_in == epoch:
                self._adopted += [(rank, adopted) for adopted in hello.adopted]
        self._offered.clear()

    def committed(self, upto: int) -> int:
        """Return the last committed move among those up to an epoch; 0 if there is none."""
        return next((epoch for epoch in reversed(self._committed) if epoch <= upto), 0)

    def take_adopted(self) -> list[tuple[Rank, Adopted]]:
        """Return the tasks that changed their leader since the last call, with the new one."""
        adopted, self._adopted = self._adopted, []
        return adopted

"""Which KV migrations are committed, and who leads their tasks from then on.

Invariant: a migration is committed once, in the same step in which its tasks change their leader,
and only if every participating rank copied its share, or is lost together with the groups that need
the share. A rank that reads a later stage compares the epoch of its migration with the committed
one, and so knows the outcome. The switcher calls this module.
"""

from collections import deque
from collections.abc import Iterable

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.terms import Binding, TaskId

COMMITTED_REMEMBERED = 1_024
"""Number of committed migrations to remember: a rank cut out during one asks for it later."""


class MoveCommits:
    """The last migration and its outcome."""

    __slots__ = (
        "_adopted",
        "_committed",
        "_last_directive",
        "_offered",
        "_without_heir",
        "movers",
    )

    def __init__(self) -> None:
        self._committed: deque[int] = deque(maxlen=COMMITTED_REMEMBERED)
        self._offered: dict[Rank, RankHello] = {}
        """The hellos of ranks that would continue a migration, until recovery knows its outcome."""
        self._last_directive = 0, 0
        """The latest directive epoch that any rank reports, and the last committed migration it
        named."""
        self.movers: tuple[Rank, ...] = ()
        """The parked ranks that take part in the migration of this epoch."""
        self._adopted: list[tuple[Rank, Adopted]] = []
        self._without_heir: list[tuple[Rank, TaskId]] = []

    def start(self, reports: Iterable[Report | None]) -> bool:
        """Make the parked ranks the movers; False if there are none, so nothing can migrate."""
        self.movers = tuple(each.rank for each in reports if each and each.binding is None)
        return bool(self.movers)

    def cover(self, bindings: Iterable[Binding]) -> bool:
        """Return whether all ranks of these groups take part."""
        return all(set(each.group.ranks).issubset(self.movers) for each in bindings)

    def decide(self, epoch: int, reports: Iterable[Report | None]) -> bool:
        """Commit the migration, unless a rank could not copy its share: then no rank gives up KV.

        `reports` are those in which the movers acknowledge the migration. Returns whether it is
        committed.
        """
        acks = list(reports)
        if any(report is None or report.has_failed for report in acks):
            return False
        self._committed.append(epoch)
        self._adopted += [
            (report.rank, adopted) for report in acks if report for adopted in report.adopted
        ]
        return True

    def on_hello(self, hello: RankHello) -> None:
        """Store what a rank continues if an earlier coordinator committed its migration."""
        self._offered[hello.rank] = hello

    def on_report(self, report: Report) -> None:
        """Store what a rank heard from an earlier coordinator; true even if its process ended."""
        self._last_directive = max(self._last_directive, (report.heard_in_epoch, report.moved))

    def recover(self) -> None:
        """Assume that an earlier coordinator committed nothing later than the ranks have heard of.

        No rank has carried out a migration whose commit none has heard of.
        """
        epoch = self._last_directive[1]
        self._committed.append(epoch)
        movers = {rank: each for rank, each in self._offered.items() if each.adopted_in == epoch}
        for rank, hello in sorted(movers.items()):
            self._adopted += [(rank, adopted) for adopted in hello.adopted]
        heirs = {adopted.task for _, adopted in self._adopted}
        self._without_heir += [
            (rank, held.header.task)
            for rank, hello in sorted(movers.items())
            for held in hello.held
            if held.moves and held.header.task not in heirs
        ]
        self._offered.clear()

    def committed(self, upto: int) -> int:
        """Return the last committed migration up to an epoch; 0 if there is none."""
        return next((epoch for epoch in reversed(self._committed) if epoch <= upto), 0)

    def take_without_heir(self) -> list[tuple[Rank, TaskId]]:
        """Return (old leader, task) for tasks of a committed migration that went to ranks unheard.

        The old leader gives such a task away, or gives it back. Returned once, after recovery.
        """
        tasks, self._without_heir = self._without_heir, []
        return tasks

    def take_adopted(self) -> list[tuple[Rank, Adopted]]:
        """Return (new leader, task) for tasks that changed their leader since the last call."""
        adopted, self._adopted = self._adopted, []
        return adopted

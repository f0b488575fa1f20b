"""Moves open tasks between cells when cells die, drain, fill up or fall idle.

A stream continues in another cell after its delivered tokens. The task's token stream drops later
tokens of the former cell, and the former cell gets a Cancel, immediately or when it is back. Called
by the relay with its clock's time in seconds; pure.
"""

from collections.abc import Callable, Collection

from coordinator.protocol.messages.gateway import GatewayUp, Withdraw
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId
from gateway.fleet.placement import Needs
from gateway.fleet.roster import CellRoster, MoveReason
from gateway.open_requests import OpenRequest, OpenRequests

FULL_CODES = frozenset({"queue_full", "tier_capacity", "no_healthy_workers"})
"""Refusals with these codes do not apply to other cells."""

Updates = list[tuple[str, GatewayUp]]
"""Each cell with its message, in order."""


def needs_of(header: TaskHeader) -> Needs:
    """Return what a task needs of a cell."""
    return Needs(header.task, header.tier, header.prompt_tokens + header.max_tokens)


class Rebalancer:
    """Moves a gateway's open tasks between the cells of its roster."""

    def __init__(
        self,
        book: OpenRequests,
        cells: CellRoster,
        moved: Callable[[MoveReason], None] = lambda _: None,
    ) -> None:
        """`moved` is called for each task that leaves a cell."""
        self._book = book
        self._cells = cells
        self._moved = moved
        self._asked: dict[TaskId, str] = {}
        """Queued tasks that a cell was asked to give up, with the cell that will get them."""

    def tick(self, now_s: float) -> Updates:
        """Move tasks of dead cells, spill queues, and forget cells that are long gone."""
        updates = self.cell_changed(now_s)
        updates += self._spill()
        for cell in self._cells.forget({task.cell for task in self._book if task.cell}, now_s):
            self._book.forget(cell)
        return updates

    def cell_changed(self, now_s: float) -> Updates:
        """Move tasks out of cells they must leave, and tasks that no connected cell has."""
        if not (self._cells.in_fleet and self._cells.are_open):
            return []
        evacuations, up = self._cells.evacuations(now_s), self._cells.up
        away = [
            task
            for task in self._book
            if task.cell in evacuations or not (task.submitted or task.cell in up)
        ]
        updates: Updates = []
        for task in away:
            updates += self._move(task, evacuations.get(task.cell or "", MoveReason.DEAD))
        return updates

    def refused(self, task_id: TaskId, code: str, cell: str) -> Updates:
        """Move a task that a full cell refused to another one, if there is one."""
        task = self._book.get(task_id)
        if task is None or task.cell != cell or code not in FULL_CODES or task.delivered:
            return []
        task.refused_by = (*task.refused_by, cell)
        return self._move(task, MoveReason.FULL, task.refused_by)

    def withdrawn(self, task_id: TaskId, cell: str) -> Updates:
        """Move a queued task that its cell gave up on request."""
        wanted = self._asked.pop(task_id, None)
        task = self._book.get(task_id)
        if task is None or task.cell != cell:
            return []
        if wanted in self._cells.up:
            return self._to(task, wanted, MoveReason.SPILL)
        # The idle cell is gone: use any other one, or this one again.
        return self._move(task, MoveReason.SPILL) or [(cell, task.submit())]

    def _move(
        self, task: OpenRequest, reason: MoveReason, without: Collection[str] = ()
    ) -> Updates:
        """Move a task to the best cell; return nothing if there is no other."""
        if not self._cells.in_fleet:
            return []
        cell = self._cells.choose(needs_of(task.header), task.prefixes, without)
        return [] if cell is None or cell == task.cell else self._to(task, cell, reason)

    def _to(self, task: OpenRequest, cell: str, reason: MoveReason) -> Updates:
        self._asked.pop(task.id, None)
        if task.cell is not None:
            self._moved(reason)
        self._cells.sent(cell, task.prefixes)
        return self._book.move(task, cell)

    def _spill(self) -> Updates:
        """Ask busy cells for queued tasks that could begin in an idle cell."""
        self._asked = {task: cell for task, cell in self._asked.items() if self._book.get(task)}
        updates: Updates = []
        for each in self._cells.spills():
            waiting = [
                task
                for task in self._book.of_cell(each.busy)
                if task.submitted and not task.stream.attempt and task.id not in self._asked
            ]
            # The last in the queue gain most.
            for task in waiting[-each.tasks :]:
                self._asked[task.id] = each.idle
                updates.append((each.busy, Withdraw(task.id)))
        return updates

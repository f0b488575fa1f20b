"""Why tasks go on in another cell, and that each such move is counted once."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from coordinator.protocol.messages.gateway import CellLoad, CellState, Submit, Withdraw
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from gateway.fleet.rebalancer import Rebalancer
from gateway.fleet.roster import CellRoster, MoveReason
from gateway.open_requests import OpenRequests

A, B = "a:1", "b:1"
STATE = CellState("dp2", 1, serving=True, world=2, ranks_alive=2, queued=0, max_context_tokens=512)
IDLE, BUSY = CellLoad((0, 0, 0), 0, 8, 90, 100), CellLoad((0, 1, 0), 8, 8, 10, 100)
TASK = TaskId("task")


@dataclass
class World:
    """One task in cell A, and a cell B."""

    roster: CellRoster = field(default_factory=lambda: CellRoster([A, B], 2.0, in_fleet=True))
    book: OpenRequests = field(default_factory=OpenRequests)
    moved: Counter[MoveReason] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.spread = Rebalancer(self.book, self.roster, self._moved)
        for cell in (A, B):
            self.roster.opened(cell)
            self.book.session_opened(cell)
            self.say(cell)
        header = TaskHeader(TASK, "g", "tcp://g", 3, 9, Tier.STANDARD)
        assert isinstance(self.book.open(header, b"", 0.0, cell=A), Submit)

    def _moved(self, reason: MoveReason) -> None:
        self.moved[reason] += 1

    def say(self, cell: str, **state: Any) -> None:
        self.roster.update(cell, msgspec.structs.replace(STATE, **{"load": IDLE, **state}))

    def cell(self) -> str | None:
        task = self.book.get(TASK)
        assert task is not None
        return task.cell


@pytest.mark.parametrize(
    ("state", "reason"),
    [({"draining": True}, MoveReason.DRAINING), ({"ranks_alive": 0}, MoveReason.DEAD)],
)
def test_a_cell_is_left_for_what_it_says(state: dict[str, Any], reason: MoveReason) -> None:
    world = World()
    world.say(A, **state)
    for now_s in (1.0, 2.0):
        world.spread.cell_changed(now_s)
    assert (world.cell(), world.moved) == (B, {reason: 1})


def test_a_cell_is_left_once_it_is_dead() -> None:
    world = World()
    world.roster.closed(A, 10.0)
    world.book.session_closed(A)
    world.spread.tick(11.0)
    assert (world.cell(), world.moved) == (A, {})
    world.spread.tick(12.0)
    assert (world.cell(), world.moved) == (B, {MoveReason.DEAD: 1})


def test_a_full_cell_is_left_by_the_task_that_it_refused() -> None:
    world = World()
    assert world.spread.refused(TASK, "invalid_value", A) == []
    assert world.moved == {}
    assert world.spread.refused(TASK, "queue_full", A)
    assert (world.cell(), world.moved) == (B, {MoveReason.FULL: 1})
    assert world.spread.refused(TASK, "queue_full", B) == [], "both are full"
    assert world.moved == {MoveReason.FULL: 1}


def test_a_queued_task_goes_to_an_idle_cell() -> None:
    world = World()
    world.say(A, load=BUSY)
    assert world.spread.tick(1.0) == [(A, Withdraw(TASK))]
    assert world.moved == {}, "the cell has not given it up yet"
    world.spread.withdrawn(TASK, A)
    assert (world.cell(), world.moved) == (B, {MoveReason.SPILL: 1})


def test_a_task_that_was_in_no_cell_does_not_move() -> None:
    world = World()
    header = TaskHeader(TaskId("other"), "g", "tcp://g", 3, 9, Tier.STANDARD)
    world.book.open(header, b"", 0.0, cell=None)
    world.spread.cell_changed(1.0)
    task = world.book.get(header.task)
    assert task is not None and task.cell in (A, B)
    assert world.moved == {}

"""A move is planned as soon as all have told, and only that plan is used which is the asked one."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from comm_pool.cpu.cell_memory import CellMemory
from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.terms import Carry, Phase, Target
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell
from worker.rank.migration import plan_ahead
from worker.rank.migration.plan_ahead import MigrationPlanner

EPOCH = 7
BORN = 1
"""The incarnation of all ranks, where nothing else is said."""
WANTED = target("tp4", EPOCH)


def directive_of(
    phase: Phase = Phase.PARK,
    *,
    epoch: int = EPOCH,
    wanted: Target = WANTED,
    carry: Carry = Carry.RESHARD,
    movers: tuple[int, ...] = (0, 1, 2, 3),
    members: dict[int, int] | None = None,
) -> Directive:
    return directive(wanted, epoch, phase, carry=carry, movers=movers, members=members)


MOVE = directive_of(Phase.MOVE)


class Desk:
    """Rank 1's planning, and what is on all boards; a plan is what it was made from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeCell(4).engines[Rank(1)]
        self.mailboxes = dict(self.engine.mailboxes)
        for rank in range(4):
            self.publish(rank)
        self.made: list[Any] = []
        self.fails = False
        monkeypatch.setattr(plan_ahead, "plan_move", self._plan)
        monkeypatch.setattr(plan_ahead, "without_empty_blocks", lambda move, *_: move)
        self.planning = MigrationPlanner(self.engine, self.mailboxes, Rank(1))

    def publish(self, rank: int, epoch: int = EPOCH) -> None:
        self.engine.mailboxes[Rank(rank)].publish(epoch, pickle.dumps(f"by {rank}"))

    def _plan(self, *given: Any) -> Any:
        self.made.append(given)
        if self.fails:
            raise ValueError("no plan")
        return given

    def plan(self, asked: Directive = MOVE) -> Any:
        return self.planning.plan(asked)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_it_is_planned_before_it_is_asked_for(desk: Desk) -> None:
    assert not desk.planning.plan_ahead(directive_of())
    assert not desk.planning.plan_ahead(directive_of()), "once is enough"
    everything = {rank: f"by {rank}" for rank in range(4)}
    assert desk.made == [(1, everything, WANTED, desk.engine.kv.geometry)]
    assert desk.plan() == desk.made[0]
    assert len(desk.made) == 1
    desk.plan()
    assert len(desk.made) == 2, "a plan is used once"


def test_it_waits_until_all_have_told(desk: Desk) -> None:
    desk.publish(3, EPOCH - 1)
    assert desk.planning.plan_ahead(directive_of())
    assert desk.made == []
    desk.publish(3)
    assert not desk.planning.plan_ahead(directive_of())
    assert len(desk.made) == 1


@pytest.mark.parametrize(
    "asked",
    [
        directive_of(Phase.MOVE, movers=(0, 1, 2)),
        directive_of(Phase.MOVE, wanted=target("tp2+tp2", EPOCH)),
        directive_of(Phase.MOVE, epoch=EPOCH + 1),
    ],
    ids=["fewer move", "another layout", "another switch"],
)
def test_another_move_than_the_foreseen_one_is_planned_anew(desk: Desk, asked: Directive) -> None:
    desk.planning.plan_ahead(directive_of())
    desk.plan(asked)
    assert len(desk.made) == 2
    assert desk.made[1][1].keys() == set(asked.movers)
    assert desk.made[1][2] == asked.target


def test_what_could_not_be_foreseen_is_said_by_the_move(desk: Desk) -> None:
    desk.fails = True
    assert not desk.planning.plan_ahead(directive_of())
    assert not desk.planning.plan_ahead(directive_of())
    assert len(desk.made) == 1
    with pytest.raises(ValueError, match="no plan"):
        desk.plan()


def test_who_has_no_board_is_neither_awaited_nor_read(desk: Desk) -> None:
    del desk.mailboxes[Rank(0)]
    desk.planning.plan_ahead(directive_of())
    assert desk.made[0][1].keys() == {1, 2, 3}
    assert desk.plan() == desk.made[0]


def test_a_process_that_came_since_is_neither_awaited_nor_read(desk: Desk) -> None:
    """It and who came with it have boards of their own: nobody writes on those that are known."""
    anew = {2: BORN + 1, 3: BORN + 1}
    for rank in anew:
        desk.publish(rank, EPOCH - 1)
    assert not desk.planning.plan_ahead(directive_of(members=anew))
    assert desk.made[0][1].keys() == {0, 1}
    assert desk.plan(directive_of(Phase.MOVE, members=anew)) == desk.made[0]


def test_in_shared_memory_a_board_is_that_of_whoever_has_the_rank(desk: Desk) -> None:
    desk.engine.spec = replace(desk.engine.spec, memory=CellMemory(()))
    desk.publish(3, EPOCH - 1)
    assert desk.planning.plan_ahead(directive_of(members={3: BORN + 1})), "it is awaited"
    desk.publish(3)
    assert desk.plan(directive_of(Phase.MOVE, members={3: BORN + 1}))[1].keys() == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        directive_of(Phase.MOVE),
        directive_of(Phase.SERVE),
        directive_of(carry=Carry.PAUSE),
        directive_of(carry=Carry.DRAIN),
    ],
)
def test_only_a_move_that_is_to_come_is_foreseen(desk: Desk, wanted: Directive | None) -> None:
    assert not desk.planning.plan_ahead(wanted)
    assert desk.made == []


def test_ranks_whose_group_stays_are_neither_awaited_nor_read(desk: Desk) -> None:
    wanted = target("tp2+dp2", EPOCH, EPOCH - 1)
    for rank in (2, 3):
        desk.publish(rank, EPOCH - 1)
    assert not desk.planning.plan_ahead(directive_of(wanted=wanted))
    assert desk.made[0][1].keys() == {0, 1}
    assert desk.plan(directive_of(Phase.MOVE, wanted=wanted, movers=(0, 1))) == desk.made[0]

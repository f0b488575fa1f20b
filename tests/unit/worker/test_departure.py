"""When a leader leaves its group for a move: with the others, if one more step brings it nearer."""

import time
from typing import Any

import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import Leave
from coordinator.protocol.terms import Binding, Carry, Phase, Stage, Target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from worker.rank.departure import STEPS_MAX, Departure, is_worth_a_step

MS = 1_000_000
ALONE = [Binding(Group((Rank(rank),), Mode.DP), 3) for rank in range(3)]
PAIR = Binding(Group((Rank(0), Rank(1)), Mode.TP), 4)
HOUR_NS = 3_600_000 * MS


class Stage0:
    """Rank 0 decodes alone, in steps of 20 ms; rank 1's last one ends `later_ms` behind its own."""

    def __init__(self, later_ms: int, *, decodes: int = 3, waits: int = 0) -> None:
        rank = FakeRank(FakeCell(4))
        self.rank, self.engine, self.steps = rank, rank.engine, rank.runtime.steps
        rank.serve(ALONE[0], 16)
        for number in range(decodes):
            rank.place(f"decodes {number}", ALONE[0], prompt=range(20))
        rank.step()
        for number in range(waits):
            rank.place(f"waits {number}", ALONE[0])
        self.steps.ends_ns, self.steps.decode_ns = time.monotonic_ns() + HOUR_NS, 20 * MS
        # Rank 2 is not asked to be with us.
        for other, later_ns in ((1, later_ms * MS), (2, HOUR_NS)):
            self.engine.mailboxes[Rank(other)].expect_end(self.steps.ends_ns + later_ns)
        self.leaving = Departure(rank.runtime, Rank(0))

    def is_put_off(self, **changed: Any) -> bool:
        """Ask as the core does: what is put off counts."""
        asked = leave(**changed)
        is_put_off = self.leaving.is_put_off(asked, time.monotonic_ns())
        if is_put_off:
            self.leaving.put_off(asked)
        return is_put_off

    def defers_step(self, **changed: Any) -> bool:
        """Ask as the core does: it defers what it may defer."""
        asked = leave(**changed)
        may_defer = self.leaving.may_defer_step(asked)
        if may_defer:
            self.leaving.defer_step(asked)
        return may_defer


def leave(epoch: int = 4, carry: Carry = Carry.RESHARD, **changed: Any) -> Leave:
    stage = Stage(epoch, Phase.PARK)
    directive = Directive(1, 0, 1_000, stage, Target((PAIR, ALONE[2])), carry, ())
    given = {"is_leader": True, "group_lost": False, **changed}
    return Leave(binding=ALONE[0], carry=carry, directive=directive, **given)


def test_a_step_is_worth_it_if_it_ends_nearer() -> None:
    assert not is_worth_a_step(100, 20, [110])
    assert is_worth_a_step(100, 20, [105, 111])
    assert not is_worth_a_step(100, 20, [])
    assert not is_worth_a_step(100, 0, [500]), "nobody knows how long it takes"


@pytest.mark.parametrize(("later_ms", "expected"), [(0, False), (9, False), (11, True)])
def test_it_waits_for_the_others_of_its_new_group_alone(later_ms: int, expected: bool) -> None:
    assert Stage0(later_ms).is_put_off() is expected


def test_it_leaves_after_some_steps_whatever_others_expect() -> None:
    stage = Stage0(1_000)
    assert [stage.is_put_off() for _ in range(STEPS_MAX + 2)] == [True] * STEPS_MAX + [False] * 2
    assert stage.is_put_off(epoch=5), "another switch"


def test_who_is_known_to_be_over_is_not_waited_for() -> None:
    stage = Stage0(1_000)
    mailbox = stage.engine.mailboxes[Rank(1)]
    mailbox.publish(4, b"its last step is in flight")
    assert stage.is_put_off()
    mailbox.settle(b"its last tokens")
    assert not stage.is_put_off()


def test_a_step_that_may_read_a_prompt_or_has_nothing_to_do_is_none() -> None:
    assert not Stage0(1_000, waits=1).is_put_off()
    assert not Stage0(1_000, decodes=0).is_put_off()


@pytest.mark.parametrize(
    "changed",
    [{"is_leader": False}, {"group_lost": True}, {"carry": Carry.PAUSE}],
    ids=lambda changed: next(iter(changed)),
)
def test_only_a_leader_that_is_to_move_its_tasks_waits(changed: dict[str, Any]) -> None:
    assert not Stage0(1_000).is_put_off(**changed)


def test_asking_changes_nothing() -> None:
    stage = Stage0(1_000)
    asked = leave()
    for _ in range(STEPS_MAX + 2):
        assert stage.leaving.is_put_off(asked, 0)
        assert stage.leaving.may_defer_step(asked)


def test_a_last_step_is_held_once_for_each_switch() -> None:
    stage = Stage0(0)
    epochs = (4, 4, 5, 5)
    assert [stage.defers_step(epoch=epoch) for epoch in epochs] == [True, False] * 2


@pytest.mark.parametrize(
    "changed", [{"is_leader": False}, {"group_lost": True}, {"carry": Carry.PAUSE}]
)
def test_only_a_leader_whose_tasks_move_holds_one(changed: dict[str, Any]) -> None:
    stage = Stage0(0)
    assert not stage.defers_step(**changed)
    assert stage.defers_step()


@pytest.mark.parametrize(("decodes", "waits"), [(0, 0), (0, 1), (3, 1)])
def test_none_is_held_unless_all_tasks_decode(decodes: int, waits: int) -> None:
    assert not Stage0(0, decodes=decodes, waits=waits).defers_step()


def test_none_is_held_that_reads_a_prompt() -> None:
    stage = Stage0(0)
    budget = stage.engine.facts().tokens_per_step_max
    stage.rank.place("long", ALONE[0], prompt=range(2 * budget))
    stage.rank.step()
    assert not stage.defers_step()
    stage.rank.step()
    stage.rank.step()
    assert stage.defers_step()


def test_none_is_held_where_steps_are_in_flight() -> None:
    stage = Stage0(0)
    stage.engine.is_synchronous = False
    stage.rank.step()
    assert not stage.defers_step()
    stage.steps.finish_inflight()
    stage.engine.holds_steps = False
    assert not stage.defers_step(), "on CUDA"
    stage.engine.holds_steps = True
    assert stage.defers_step()

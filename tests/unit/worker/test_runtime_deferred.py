"""When a step that is held has to be computed, and what becomes of a move that it fails."""

from typing import Any, cast

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.terms import Phase
from kvadaptor.transfer.mailbox import GAVE_UP
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from tests.harness.worker.leading_member import ALONE, WIDE, Stage
from worker.io.step_queue import Begin, Step
from worker.rank.migration.copy_rounds import OvertakenError

EPOCH = 7


class Held:
    """What a rank's stepping does, in order."""

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.has_deferred_step = self.is_late = True
        self.has_inflight = self.has_detached_step = False
        self.draining_groups = ()

    def run_deferred(self) -> None:
        self.done.append("catch up")
        self.has_deferred_step = self.is_late = False

    def follow(self, _mode: Any, step: Step, _binding: Any) -> None:
        self.done.append(f"step {step.plan}")

    def finish_detached_if_ready(self) -> None:
        """Nothing trails."""


def follower(*messages: Any) -> tuple[Stage, Held]:
    stage = Stage(1)
    stage.runtime.join(WIDE)
    for message in messages:
        stage.leader_queue.enqueue(message)
    held = Held(stage.done)
    cast(Any, stage.runtime).steps = held
    return stage, held


def test_it_comes_before_another_width_is_selected() -> None:
    stage = Stage()
    cast(Any, stage.runtime).steps = Held(stage.done)
    stage.note(stage.engine, "select")
    stage.runtime.join(ALONE)
    assert stage.done == ["catch up", "select"]


@pytest.mark.parametrize(
    ("message", "then"),
    [(Step(WIDE.formation, 5), ["step 5"]), (Begin(WIDE.formation, (), 1), ["end_all"])],
)
def test_a_follower_computes_it_before_it_obeys_what_comes_behind(
    message: Any, then: list[str]
) -> None:
    stage, _ = follower(message)
    stage.runtime.follow(WIDE)
    assert stage.done == ["catch up", *then]


def test_a_follower_whose_leader_stays_computes_it_after_a_while() -> None:
    stage, held = follower()
    held.is_late = False
    assert stage.runtime.follow(WIDE) is None
    assert stage.done == [], "the leader is about to leave"
    held.is_late = True
    assert stage.runtime.follow(WIDE) is None
    assert stage.done == ["catch up"]


class Desk:
    """A rank's moving, with a plan that is foreseen when `awaits` is over."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.held = Held(self.done)
        rank = FakeRank(FakeCell(4))
        cast(Any, rank.runtime).steps = self.held
        self.migration = rank.runtime.migration
        self.mailbox = rank.engine.mailboxes[Rank(0)]
        self.mailbox.publish(EPOCH, b"manifest")
        self.awaits = True
        cast(Any, self.migration.planning).plan_ahead = self._foresee

    def _foresee(self, _wanted: Any) -> bool:
        self.done.append("foresee")
        return self.awaits


def asked(phase: Phase) -> Directive:
    return directive(target("dp4", EPOCH), EPOCH, phase)


def test_it_is_computed_when_the_move_is_planned() -> None:
    desk = Desk()
    desk.held.is_late = False
    assert desk.migration.prepare(asked(Phase.PARK))
    assert desk.done == ["foresee"], "others have not told yet"
    desk.awaits = False
    assert not desk.migration.prepare(asked(Phase.PARK))
    assert desk.done == ["foresee", "foresee", "catch up"]


@pytest.mark.parametrize("wanted", [None, asked(Phase.PARK)])
def test_it_waits_for_others_no_longer_than_it_may(wanted: Directive | None) -> None:
    desk = Desk()
    desk.held.is_late = False
    assert desk.migration.prepare(wanted), "what is held is to be looked for again soon"
    assert "catch up" not in desk.done
    desk.held.is_late = True
    desk.migration.prepare(wanted)
    assert desk.done[-1] == "catch up"


def test_nothing_is_looked_for_where_nothing_is_held_or_moved() -> None:
    desk = Desk()
    desk.held.has_deferred_step = desk.held.is_late = False
    assert not desk.migration.prepare(None)
    assert desk.done == []


def test_whoever_waits_in_a_move_computes_it_first() -> None:
    desk = Desk()
    with pytest.raises(OvertakenError):
        desk.migration._rounds.wait(lambda: False, lambda: True, "nobody comes")
    assert desk.done == ["catch up"]


def test_a_move_that_was_planned_from_what_is_not_true_fails() -> None:
    desk = Desk()
    desk.migration.lose()
    assert desk.mailbox.round == GAVE_UP, "others hear of it at once"
    assert not desk.migration.is_quiescing
    desk.mailbox.finish_round(0)
    desk.migration.move(asked(Phase.MOVE), lambda: False)
    assert (desk.migration.has_failed, desk.mailbox.round) == (True, GAVE_UP)
    assert desk.migration.adopted == ()

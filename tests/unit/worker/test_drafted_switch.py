"""The plan of a switch is drafted while groups serve: when it holds, and what is published then."""

from typing import Any

import pytest

from coordinator.protocol.messages.rank import Place
from tests.harness.coordinator.builders import header
from tests.harness.worker.core_cell import CoreCell
from tests.harness.worker.early_cell import (
    TOKENS,
    busy,
    check_streams,
    copy_early,
    finish_move,
    scheduler_of,
)
from tests.harness.worker.fake_scheduler import fake_payload
from worker.rank.migration import plan_ahead
from worker.rank.migration.manifest import MigrationPlan, plan_move


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each plan that a rank made anew after its group was left."""
    made: list[bool] = []

    def noted(*given: Any) -> MigrationPlan:
        made.append(True)
        return plan_move(*given)

    monkeypatch.setattr(plan_ahead, "plan_move", noted)
    return made


@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_the_plan_of_the_switch_is_drafted_while_groups_serve(
    old: str, groups: int, new: str, plans: list[bool]
) -> None:
    cell = busy(old, groups)
    copy_early(cell, new)
    copy_early(cell, new, 2, drafts=True)
    assert len(plans) == 2
    cell.turn(3)
    finish_move(cell)
    assert len(plans) == 2, "the drafts hold"
    check_streams(cell)


def test_a_task_that_has_ended_since_is_not_in_the_plan(plans: list[bool]) -> None:
    cell = CoreCell("dp2")
    cell.place_task("short", 0, range(40), 12)
    cell.place_task("long", 1, range(50, 90), TOKENS)
    cell.turn(3)
    copy_early(cell, "tp2")
    copy_early(cell, "tp2", 2, drafts=True)
    assert len(cell.streams["short"]) < 12
    cell.turn(8)
    assert len(cell.streams.pop("short")) == 12
    cell.prompts.pop("short")
    finish_move(cell)
    assert len(plans) == 2
    check_streams(cell)


def test_a_draft_holds_while_tasks_fill_blocks_that_they_had_in_advance(plans: list[bool]) -> None:
    """A block has 32 tokens, and its prompt 52: the second is full after 12 more."""
    cell = CoreCell("dp2")
    for group in range(2):
        cell.place_task(f"task-{group}", group, range(50 * group, 50 * group + 52), TOKENS)
    cell.turn(2)
    copy_early(cell, "tp2")
    copy_early(cell, "tp2", 2, drafts=True)
    blocks = [scheduler_of(each).movable(0)[0][0].blocks.size for each in cell.ranks]
    cell.turn(6)
    assert blocks == [scheduler_of(each).movable(0)[0][0].blocks.size for each in cell.ranks]
    finish_move(cell)
    assert len(plans) == 2
    check_streams(cell)


def test_a_plan_is_made_anew_if_a_task_has_come(plans: list[bool]) -> None:
    cell = busy("dp2", 2)
    copy_early(cell, "tp2")
    copy_early(cell, "tp2", 2, drafts=True)
    binding = cell.ranks[1].participant.binding
    assert binding is not None
    given, payload = header("new", max_tokens=TOKENS), fake_payload("new", (1, 2, 3), TOKENS)
    cell.prompts["new"] = (1, 2, 3)
    cell.ranks[1].hear(Place(given, 1, binding, payload))
    cell.turn(2)
    finish_move(cell)
    assert len(plans) == 4
    check_streams(cell)


def test_a_draft_outlasts_its_switch_for_nobody(plans: list[bool]) -> None:
    cell = busy("dp2", 2)
    copy_early(cell, "tp2")
    copy_early(cell, "tp2", 2, drafts=True)
    cell.retarget("tp2")
    finish_move(cell)
    assert len(plans) == 4
    check_streams(cell)

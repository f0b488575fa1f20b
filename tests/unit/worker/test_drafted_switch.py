"""The plan of a switch is drafted while groups serve: when it holds, and what is published then."""

import pickle
from typing import Any

import pytest

from coordinator.protocol.messages.rank import Place
from coordinator.protocol.terms import Carry, Phase, ReturnCause, TaskId
from tests.harness.coordinator.builders import header
from tests.harness.worker.core_cell import CoreCell
from tests.harness.worker.early_cell import (
    TOKENS,
    busy,
    check_streams,
    copy_early,
    finish_move,
    leave_groups,
    scheduler_of,
)
from tests.harness.worker.fake_scheduler import fake_payload
from worker.rank.migration import migration, plan_ahead
from worker.rank.migration.manifest import Manifest, MigrationPlan, manifest_of, plan_move
from worker.rank.migration.manifest_changes import ManifestChanges, changes_since
from worker.rank.migration.precopy import ORDER_LIMIT_S


def drafted_cell(old: str = "dp2", groups: int = 2, new: str = "tp2") -> CoreCell:
    """A cell whose ranks have drafted the plan of a switch in round 2, and serve on."""
    cell = busy(old, groups)
    copy_early(cell, new)
    copy_early(cell, new, 2, drafts=True)
    return cell


def published_by(cell: CoreCell) -> list[Manifest | ManifestChanges]:
    """What each rank has published last."""
    return [pickle.loads(each.message) for each in cell.ranks[0].engine.mailboxes.values()]


def changed(cell: CoreCell, drafted: int = 2) -> list[bool]:
    """Let all ranks leave; return whether each has published no more than changes."""
    leave_groups(cell, drafted)
    return [isinstance(each, ManifestChanges) for each in published_by(cell)]


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
    cell = drafted_cell(old, groups, new)
    assert len(plans) == 2
    cell.turn(3)
    finish_move(cell, drafted=2)
    assert len(plans) == 2, "the drafts hold"
    check_streams(cell)


@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_ranks_publish_what_has_changed_since(
    old: str, groups: int, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[int, Manifest] = {}

    def noted(before: Manifest, runtime: Any, rank: Any, *own: Any) -> ManifestChanges | None:
        early = runtime.migration.precopy.held(cell.epoch)
        group, formation, draft = own
        wanted[rank] = manifest_of(runtime, rank, group, formation, early, draft=draft)
        return changes_since(before, runtime, rank, *own)

    monkeypatch.setattr(migration, "changes_since", noted)
    cell = drafted_cell(old, groups, new)
    known = [each.runtime.migration.planning.manifest_in(cell.epoch, 2) for each in cell.ranks]
    cell.turn(3)
    assert changed(cell) == [True, True]
    for rank, (before, now) in enumerate(zip(known, published_by(cell), strict=True)):
        assert before is not None and isinstance(now, ManifestChanges)
        assert summary(now.whole(before)) == summary(wanted[rank])


def summary(manifest: Manifest) -> Any:
    """All that a plan is made of, for ranks that cache nothing."""
    tasks = [
        (
            *(each.header, each.attempt, each.emitted, each.payload, each.state.tokens()),
            *(each.state.computed, each.state.settled, each.state.blocks.tolist()),
            *(each.state.count, each.state.hashes, each.state.preemptions),
        )
        for each in manifest.cargo
    ]
    arrays = manifest.pages, manifest.slots, manifest.free, manifest.written
    early = [(each.key, each.blocks.tolist()) for each in manifest.early]
    group = manifest.ranks, manifest.formation, manifest.stages
    own = manifest.rank, *group, manifest.draft, manifest.num_pages
    indices = {key: each.tolist() for key, each in manifest.indices.items()}
    return own, tasks, [each.tolist() for each in arrays], early, indices


def test_ranks_publish_all_if_some_rank_has_not_drafted() -> None:
    cell = drafted_cell()
    assert changed(cell, drafted=0) == [False, False]


def test_a_rank_whose_pages_went_back_publishes_all_and_reads_the_changes_of_others() -> None:
    cell = drafted_cell()
    cell.ranks[0].runtime.host.sleep(ORDER_LIMIT_S + 1)
    cell.turn(2)
    assert changed(cell) == [False, True]
    cell.ask(cell.wanted(Phase.MOVE, Carry.RESHARD))
    assert not any(each.reports[-1].has_failed for each in cell.ranks)
    cell.moved = cell.epoch
    for phase in (Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, Carry.RESHARD))
    check_streams(cell)


def test_a_rank_that_has_not_read_the_rest_plans_nothing() -> None:
    """Nobody's tasks are lost: the move fails, and they are computed again."""
    cell = drafted_cell()
    cell.ranks[0].runtime.migration.planning.forget_manifests()
    assert changed(cell) == [False, True]
    cell.ask(cell.wanted(Phase.MOVE, Carry.RESHARD))
    assert cell.ranks[0].reports[-1].has_failed
    assert all(len(each.runtime.book) for each in cell.ranks), "each still leads its task"
    for phase in (Phase.SWAP, Phase.SERVE):
        cell.ask(cell.wanted(phase, Carry.RESHARD))
    causes = [cause for each in cell.ranks for _, cause in each.returned]
    assert causes == [ReturnCause.RECOMPUTE] * 2


def test_a_task_of_a_new_attempt_is_published_whole() -> None:
    cell = drafted_cell()
    led = cell.ranks[1].runtime.book.get(TaskId("task-1"))
    assert led is not None
    led.attempt += 1
    assert changed(cell) == [True, False]


def test_a_rank_with_other_pages_publishes_all() -> None:
    cell = drafted_cell()
    pool = cell.ranks[1].engine.pages
    pool.keep_own(pool.own_pages()[:-1])
    assert changed(cell) == [True, False]


def test_a_switch_that_is_called_off_leaves_no_manifests() -> None:
    cell = busy("dp2", 2)
    old = cell.target
    copy_early(cell, "tp2")
    copy_early(cell, "tp2", 2, drafts=True)
    plannings = [each.runtime.migration.planning for each in cell.ranks]
    assert all(each._manifests for each in plannings)
    cell.epoch += 1
    cell.target = old
    for each in cell.ranks:
        each.hear(cell.wanted(Phase.PARK, Carry.RESHARD))
    cell.turn(3)
    assert not any(each._manifests for each in plannings)
    check_streams(cell)


def test_a_preempted_task_has_other_blocks() -> None:
    cell = drafted_cell()
    request = scheduler_of(cell.ranks[1]).requests[TaskId("task-1")]
    request.preemptions += 1
    assert changed(cell) == [True, False]


def test_a_task_that_has_ended_since_is_not_in_the_plan(plans: list[bool]) -> None:
    cell = CoreCell("dp2")
    cell.place_task("short", 0, range(40), 14)
    cell.place_task("long", 1, range(50, 90), TOKENS)
    cell.turn(3)
    copy_early(cell, "tp2")
    copy_early(cell, "tp2", 2, drafts=True)
    assert len(cell.streams["short"]) < 14
    cell.turn(8)
    assert len(cell.streams.pop("short")) == 14
    cell.prompts.pop("short")
    finish_move(cell, drafted=2)
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
    finish_move(cell, drafted=2)
    assert len(plans) == 2
    check_streams(cell)


def test_a_plan_is_made_anew_if_a_task_has_come(plans: list[bool]) -> None:
    cell = drafted_cell()
    binding = cell.ranks[1].participant.binding
    assert binding is not None
    given, payload = header("new", max_tokens=TOKENS), fake_payload("new", (1, 2, 3), TOKENS)
    cell.prompts["new"] = (1, 2, 3)
    cell.ranks[1].hear(Place(given, 1, binding, payload))
    cell.turn(2)
    finish_move(cell, drafted=2)
    assert len(plans) == 4
    check_streams(cell)


def test_a_draft_outlasts_its_switch_for_nobody(plans: list[bool]) -> None:
    cell = drafted_cell()
    cell.retarget("tp2")
    finish_move(cell, drafted=2)
    assert len(plans) == 4
    check_streams(cell)

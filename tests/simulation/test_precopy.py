"""Cells whose ranks copy KV before they leave their groups: nothing is lost, and it is used.

After each tick, each page of a serving group is its scheduler's or set aside. More seeds are in
`test_seeds`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.simulation.mutations import Patch, patched
from tests.simulation.seeds import PRECOPY
from tests.simulation.sim_scheduler import SimScheduler
from tests.simulation.stats import Stats
from tests.simulation.sweep import failure_of, world_of
from worker.io.step_queue import SetAside
from worker.rank.migration import draft_plan, early_copy, manifest, migration, precopy
from worker.rank.migration.draft_plan import DraftPlan
from worker.rank.migration.early_copy import EarlyCopy
from worker.rank.migration.early_requests import EarlyRequests
from worker.rank.migration.manifest import Manifest, TaskSnapshot
from worker.rank.migration.manifest_changes import ManifestChanges, changes_since
from worker.rank.migration.precopy import PreCopy
from worker.rank.task_state import RunningState, StateChange

SEEDS = (2, 8, 10, 12, 14, 15, 18, 20, 22, 30, 32, 36, 45, 46, 176, 242, 317)
SEEDS_OF_A_BUG = 400


@functools.cache
def run(seed: int) -> Stats:
    return world_of(seed, PRECOPY).run()


def test_they_hold_where_kv_is_copied_before_groups_are_left() -> None:
    for seed in SEEDS:
        run(seed)


def test_they_hold_where_few_pages_are_set_aside_between_two_steps() -> None:
    with patched([(precopy, "ASIDE_PAGES", 2)]):
        found = [world_of(seed, PRECOPY).run() for seed in SEEDS]
    assert sum(each.precopied for each in found) > 50


def test_simulations_copy_early() -> None:
    assert sum(run(seed).precopied for seed in SEEDS) > 200
    assert sum(run(seed).built_early for seed in SEEDS) > 12


_finished = DraftPlan.finished


def test_some_drafts_hold_and_others_do_not() -> None:
    holds: list[bool] = []

    def noted(self: DraftPlan, manifests: Mapping[int, Manifest]) -> Any:
        move = _finished(self, manifests)
        holds.append(move is not None)
        return move

    with patched([(DraftPlan, "finished", noted)]):
        for seed in SEEDS:
            world_of(seed, PRECOPY).run()
    assert holds.count(True) > 4
    assert holds.count(False) > 4


def test_some_ranks_publish_changes_and_others_all() -> None:
    are_changes: list[bool] = []

    def noted(*given: Any) -> ManifestChanges | None:
        changes = changes_since(*given)
        are_changes.append(changes is not None)
        return changes

    with patched([(migration, "changes_since", noted)]):
        for seed in range(24):
            world_of(seed, PRECOPY).run()
    assert are_changes.count(True) > 4
    assert are_changes.count(False) > 4


_true_blocks = early_copy.true_blocks


def _all_are_true(early: Any, width_of: Any, tasks: Any, sizes: Any) -> Any:
    """Whatever has become of the task, its early copies count."""
    now = {rank: [_as_of_now(each, tasks) for each in copies] for rank, copies in early.items()}
    return _true_blocks(now, width_of, tasks, sizes)


def _as_of_now(copy: EarlyCopy, tasks: Any) -> EarlyCopy:
    if copy.task not in tasks:
        return copy
    leader, attempt, state = tasks[copy.task]
    is_there = copy.places < state.blocks.size
    places = copy.places[is_there]
    return dataclasses.replace(
        copy,
        leader=leader,
        attempt=attempt,
        preemptions=state.preemptions,
        places=places,
        blocks=state.blocks[places],
        slots=copy.slots[is_there],
    )


_hear = PreCopy.hear


def _hears_no_end(self: PreCopy, message: SetAside) -> None:
    if message.lease_indices is not None:
        _hear(self, message)


def _keeps_nothing_aside(self: SimScheduler, pages: int) -> Any:
    """Tasks may still get the pages."""
    found = _set_aside(self, pages)
    self.give_back()
    return found


_set_aside = SimScheduler.set_aside


def _stays_as_built(self: EarlyRequests, leader: int, cargo: TaskSnapshot) -> Any:
    """Tokens since then are missing."""
    built = self._built.pop(cargo.state.task, None)
    return built and (built.request, built.tokens)


def _stays_as_drafted(self: RunningState, _: StateChange) -> RunningState:
    return self


def _has_any_blocks(*_: Any) -> bool:
    """A draft holds, whatever blocks a task has by now."""
    return True


BUGS: dict[str, tuple[Patch, ...]] = {
    "copies count whatever becomes of the task": ((manifest, "true_blocks", _all_are_true),),
    "pages are not kept from tasks": ((SimScheduler, "set_aside", _keeps_nothing_aside),),
    "a draft holds for any blocks": ((draft_plan, "_is_same", _has_any_blocks),),
    "a request stays as it was built": ((EarlyRequests, "take", _stays_as_built),),
    "what tasks got since the draft is lost": ((RunningState, "later", _stays_as_drafted),),
}
FOUND_BY = {
    "copies count whatever becomes of the task": 8,
    "pages are not kept from tasks": 3,
    "a draft holds for any blocks": 15,
    "a request stays as it was built": 8,
    "what tasks got since the draft is lost": 8,
}
"""Seeds that are tried first."""


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.timeout(600)
def test_a_bug_is_found(bug: str) -> None:
    with patched(BUGS[bug]):
        seeds = [FOUND_BY[bug], *range(SEEDS_OF_A_BUG)]
        assert any(failure_of(seed, kind=PRECOPY) for seed in seeds), f"no seed finds: {bug}"

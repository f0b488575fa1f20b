"""What a switch puts off is done a bit after each step, so that no stream waits for all of it."""

import gc

import pytest

from tests.harness.worker.core_cell import CoreCell, drop
from tests.harness.worker.fake_scheduler import FakeScheduler
from worker.io.gc_pause import PAUSE_MIN_S
from worker.rank import runtime

TASKS, AT_ONCE = 8, 3
TOKENS = 30


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks tidy three tasks after a step."""
    monkeypatch.setattr(runtime, "TIDY_TASKS", AT_ONCE)


def busy(rank: int = 0) -> tuple[CoreCell, FakeScheduler]:
    """A cell in dp2 in which a rank has run some steps, and the scheduler of its tasks."""
    cell = CoreCell("dp2", pages=200)
    for number in range(TASKS):
        cell.place_task(f"task-{number}", rank, range(50 * number, 50 * number + 20), TOKENS)
    cell.turn(4)
    old = cell.ranks[rank].engine.of_width(1).scheduler
    assert old is not None
    return cell, old


def test_tasks_that_have_gone_are_freed_a_few_after_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell, old = busy()
    left: list[int] = []
    tidy = old.tidy

    def noted(most: int | None = None) -> bool:
        left.append(len(old.requests))
        return tidy(most)

    monkeypatch.setattr(old, "tidy", noted)
    cell.move("tp2")
    cell.turn(10)
    assert left[left.index(TASKS - AT_ONCE) - 1 :][:4] == [8, 5, 2, 0]
    cell.turn(60)
    assert all(len(tokens) == TOKENS for tokens in cell.streams.values())
    assert len(cell.streams) == TASKS


def test_garbage_is_collected_again_some_steps_after_a_switch() -> None:
    cell, _ = busy()
    cell.move("tp2")
    cell.turn(3)
    assert not gc.isenabled()
    for each in cell.ranks:
        each.runtime.host.sleep(PAUSE_MIN_S)
    cell.turn(2)
    assert gc.isenabled()


def test_a_follower_tidies_while_its_group_has_no_work() -> None:
    cell, old = busy(rank=1)
    cell.move("tp2")
    cell.leader_of(0).hear(*(drop(name, 2) for name in cell.streams))
    cell.turn(8)
    assert not old.requests


def test_a_rank_without_work_tidies_at_once() -> None:
    cell, old = busy()
    cell.move("tp2")
    cell.leader_of(0).hear(*(drop(name, 2) for name in cell.streams))
    cell.turn(5)
    assert not old.requests
    assert not cell.ranks[0].runtime.has_work
    assert gc.isenabled()

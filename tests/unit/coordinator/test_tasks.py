"""The order in which queued tasks are taken."""

from collections.abc import Collection

from coordinator.protocol.messages import TaskId, Tier
from coordinator.tasks import State, Task, TaskQueue
from tests.unit.coordinator.builders import header

AGEING_MS = 100


def task(name: str, arrival: int, tier: Tier = Tier.STANDARD, arrived_ms: int = 0) -> Task:
    return Task(header(name, tier=tier), arrival, arrived_ms, State.QUEUED, arrived_ms)


def queue(*tasks: Task) -> TaskQueue:
    made = TaskQueue(AGEING_MS)
    for each in tasks:
        made.put(each)
    return made


def order(of: TaskQueue, now_ms: int = 0, closed: Collection[Tier] = ()) -> list[TaskId]:
    return list(of.in_order(now_ms, closed))


def test_tier_comes_before_arrival() -> None:
    tasks = queue(task("b", 0, Tier.BATCH), task("s", 1), task("i", 2, Tier.INTERACTIVE))
    assert order(tasks) == ["i", "s", "b"]
    assert len(tasks) == 3


def test_arrival_decides_within_a_tier_whenever_a_task_is_put() -> None:
    late, early = task("late", 7), task("early", 3)
    assert order(queue(late, early)) == ["early", "late"]


def test_waiting_lifts_a_task_tier_by_tier() -> None:
    old = task("old", 0, Tier.BATCH)
    standard = task("new standard", 1, Tier.STANDARD, arrived_ms=99)
    interactive = task("new interactive", 2, Tier.INTERACTIVE, arrived_ms=99)
    tasks = queue(old, standard, interactive)
    assert order(tasks, 99) == ["new interactive", "new standard", "old"]
    assert order(tasks, 198) == ["new interactive", "old", "new standard"]
    assert order(tasks, 200) == ["old", "new standard", "new interactive"]
    assert order(tasks, 10_000)[0] == "old", "nothing rises above the highest tier"


def test_a_removed_task_is_gone_and_may_come_back() -> None:
    first, second = task("first", 0), task("second", 1)
    tasks = queue(first, second)
    tasks.remove(first)
    assert order(tasks) == ["second"]
    tasks.put(first)
    assert order(tasks) == ["first", "second"]


def test_a_closed_tier_ends_early() -> None:
    tasks = queue(task("a", 0), task("b", 1), task("c", 2, Tier.BATCH))
    closed: set[Tier] = set()
    taken = []
    for each in tasks.in_order(0, closed):
        taken.append(each)
        closed.add(Tier.STANDARD)
    # What was looked at already is still yielded.
    assert taken[0] == "a"
    assert "c" in taken

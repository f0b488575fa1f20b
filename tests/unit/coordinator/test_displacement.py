"""Which batch tasks make room for urgent ones."""

import pytest

from comm_pool.layout import Rank
from coordinator.model.events import Effect, ToRank
from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.rank import GiveBack, Place
from coordinator.protocol.messages.tasks import TaskProgress
from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.displacement import (
    DISPLACE_AFTER_MS,
    LOOK_AHEAD_TASKS,
    LOOK_EVERY_MS,
)
from coordinator.tasks.placement import OpenGroup
from coordinator.tasks.task import State
from coordinator.tasks.task_pool import TaskPool
from tests.harness.coordinator.builders import submit
from tests.harness.coordinator.pools import TWO, ZERO, group, pool, returned, state

LATE_MS = 10 * DISPLACE_AFTER_MS
PROMPT = 30
"""Of 10 blocks of 16 tokens three such tasks leave too few for another."""


def cell(*tiers: Tier, groups: int = 1) -> tuple[TaskPool, list[OpenGroup]]:
    """Groups that are full of tasks of these tiers, which have their first token."""
    tasks = pool()
    open_groups = [group(Rank(2 * number)) for number in range(groups)]
    for number, tier in enumerate(tiers):
        tasks.submit(submit(f"old{number}", prompt=PROMPT, tier=tier), number)
        tasks.place(open_groups, number)
        tasks.tasks[TaskId(f"old{number}")].generated = 1
    assert not tasks.tasks.queue
    return tasks, open_groups


def names(effects: list[Effect], kind: type) -> list[str]:
    messages = [each.message for each in effects if isinstance(each, ToRank)]
    return [
        str(each.task if isinstance(each, GiveBack) else each.header.task)
        for each in messages
        if isinstance(each, kind) and isinstance(each, GiveBack | Place)
    ]


@pytest.mark.parametrize("tier", [Tier.INTERACTIVE, Tier.STANDARD])
def test_the_newest_batch_task_makes_room(tier: Tier) -> None:
    tasks, groups = cell(Tier.BATCH, Tier.BATCH, Tier.BATCH)
    tasks.submit(submit("new", prompt=PROMPT, tier=tier), LATE_MS)
    assert tasks.place(groups, LATE_MS) == [], "tasks end all the time"
    now_ms = LATE_MS + DISPLACE_AFTER_MS
    effects = tasks.place(groups, now_ms)
    assert names(effects, GiveBack) == ["old2"]
    assert names(effects, Place) == ["new"]
    assert state(tasks, TaskId("old2")) is State.RETURNING
    tasks.returned(ZERO, returned(TaskId("old2"), 1, 7), now_ms)
    assert tasks.place(groups, now_ms + LATE_MS) == [], "it waits for room as any other"
    tasks.release(TaskId("new"), is_done=True)
    assert names(tasks.place(groups, now_ms + 2 * LATE_MS), Place) == ["old2"]


def test_as_many_as_are_needed_make_room_and_no_more() -> None:
    tasks, groups = cell(Tier.BATCH, Tier.BATCH, Tier.BATCH)
    tasks.submit(submit("new", prompt=100, tier=Tier.INTERACTIVE), 0)
    assert names(tasks.place(groups, LATE_MS), GiveBack) == ["old2", "old1"]


def test_only_batch_tasks_make_room_and_only_for_others() -> None:
    tasks, groups = cell(Tier.STANDARD, Tier.STANDARD, Tier.STANDARD)
    tasks.submit(submit("new", prompt=PROMPT, tier=Tier.INTERACTIVE), 0)
    assert tasks.place(groups, LATE_MS) == []
    tasks, groups = cell(Tier.BATCH, Tier.BATCH, Tier.BATCH)
    tasks.submit(submit("new", prompt=PROMPT, tier=Tier.BATCH), 0)
    assert tasks.place(groups, LATE_MS) == []


def test_none_is_taken_back_where_all_of_them_would_not_do() -> None:
    tasks, groups = cell(Tier.STANDARD, Tier.BATCH, Tier.STANDARD)
    tasks.submit(submit("new", prompt=100, tier=Tier.INTERACTIVE), 0)
    assert tasks.place(groups, LATE_MS) == []


def test_the_group_with_the_least_to_compute_again_makes_room() -> None:
    tasks, groups = cell(Tier.BATCH, Tier.BATCH, groups=2)
    for name, prompt in (("zero", 60), ("two", 50)):
        tasks.submit(submit(name, prompt=prompt, tier=Tier.BATCH), 1)
        tasks.place(groups, 1)
    assert tasks.tasks[TaskId("zero")].leader == ZERO
    assert tasks.tasks[TaskId("two")].leader == TWO
    tasks.submit(submit("new", prompt=2 * PROMPT, tier=Tier.INTERACTIVE), 1)
    assert names(tasks.place(groups, LATE_MS), GiveBack) == ["two"]


def test_a_group_that_cannot_make_enough_room_makes_none() -> None:
    batch, other = Tier.BATCH, Tier.STANDARD
    tasks, groups = cell(other, batch, batch, other, batch, other, groups=2)
    tasks.submit(submit("new", prompt=70, tier=Tier.INTERACTIVE), 0)
    effects = tasks.place(groups, LATE_MS)
    assert names(effects, GiveBack) == ["old4", "old2"]
    assert {each.rank for each in effects if isinstance(each, ToRank)} == {ZERO}


def test_a_group_with_room_is_used_instead() -> None:
    tasks, groups = cell(Tier.BATCH, Tier.BATCH, Tier.BATCH)
    tasks.submit(submit("new", prompt=PROMPT, tier=Tier.INTERACTIVE), 0)
    effects = tasks.place([*groups, group(TWO)], LATE_MS)
    assert names(effects, GiveBack) == []
    assert names(effects, Place) == ["new"]


def test_looks_are_some_time_apart() -> None:
    tasks, groups = cell(Tier.STANDARD, Tier.STANDARD, Tier.STANDARD)
    tasks.submit(submit("new", prompt=PROMPT, tier=Tier.INTERACTIVE), 0)
    assert tasks.place(groups, LATE_MS) == []
    tasks.tasks[TaskId("old1")].header = submit("old1", prompt=PROMPT, tier=Tier.BATCH).header
    assert tasks.place(groups, LATE_MS + LOOK_EVERY_MS - 1) == []
    assert names(tasks.place(groups, LATE_MS + LOOK_EVERY_MS), GiveBack) == ["old1"]


def grown(*tiers: Tier) -> TaskPool:
    """A group's tasks, have grown to four blocks each, beyond its ten."""
    tasks, _ = cell(*tiers)
    for number in range(len(tiers)):
        held = tasks.tasks[TaskId(f"old{number}")]
        tasks.progress(ZERO, [TaskProgress(held.id, PROMPT, paused=False)], 0)
    assert not tasks.tasks.queue
    return tasks


def test_an_urgent_task_that_lost_its_room_in_its_group_gets_it_back() -> None:
    tasks = grown(Tier.BATCH, Tier.BATCH, Tier.STANDARD)
    assert tasks.place([group()], LATE_MS) == [], "none waits"
    assert names(tasks.place([group(urgent_waiting=1)], LATE_MS), GiveBack) == ["old1"]
    assert state(tasks, TaskId("old1")) is State.RETURNING
    assert tasks.place([group(urgent_waiting=1)], 2 * LATE_MS) == [], "the others fit"


def test_all_batch_tasks_make_room_where_they_alone_do_not_suffice() -> None:
    """The urgent task that waits may be smaller than what they leave."""
    tasks = grown(Tier.STANDARD, Tier.STANDARD, Tier.BATCH)
    tasks.progress(ZERO, [TaskProgress(TaskId("old0"), 90, paused=False)], 0)
    assert names(tasks.place([group(urgent_waiting=1)], LATE_MS), GiveBack) == ["old2"]
    assert tasks.place([group(urgent_waiting=1)], 2 * LATE_MS) == []


def test_a_group_that_was_filled_exactly_has_not_outgrown_its_kv() -> None:
    """As placement counts: four, four and two blocks, and one for what each of the first wastes."""
    tasks = pool()
    for name, prompt, tier in (
        ("urgent", 47, Tier.STANDARD),
        ("batch", 47, Tier.BATCH),
        ("small", 20, Tier.BATCH),
    ):
        tasks.submit(submit(name, prompt=prompt, tier=tier), 0)
        assert names(tasks.place([group()], 0), Place) == [name]
    assert tasks.place([group(urgent_waiting=1)], LATE_MS) == []


def test_an_aged_task_makes_no_room_in_its_group() -> None:
    tasks = grown(Tier.BATCH, Tier.BATCH, Tier.STANDARD)
    tasks.tasks[TaskId("old1")].is_promoted = True
    assert names(tasks.place([group(urgent_waiting=1)], LATE_MS), GiveBack) == ["old0"]


def test_a_task_is_placed_as_aged_if_it_has_its_turn_for_its_age() -> None:
    tasks = pool()
    tasks.change_bounds(QueueBounds(1_000), ageing_ms=1_000)
    tasks.submit(submit("old", prompt=PROMPT, tier=Tier.BATCH), 0)
    for number in range(20):
        tasks.submit(submit(f"i{number}", prompt=PROMPT, tier=Tier.INTERACTIVE), 1_999)
    placed: dict[str, bool] = {}
    while "old" not in placed:
        for effect in tasks.place([group()], 2_000):
            assert isinstance(effect, ToRank)
            assert isinstance(effect.message, Place)
            placed[str(effect.message.header.task)] = effect.message.is_promoted
        for name in placed:
            tasks.release(TaskId(name), is_done=True)
    assert [name for name, is_promoted in placed.items() if is_promoted] == ["old"]


def test_tasks_that_wait_while_all_fit_cost_none() -> None:
    tasks = grown(Tier.BATCH, Tier.BATCH, Tier.STANDARD)
    assert tasks.place([group(urgent_waiting=1, blocks=16)], LATE_MS) == []


def test_a_task_that_has_just_come_may_wait_a_moment() -> None:
    tasks = grown(Tier.BATCH, Tier.BATCH, Tier.STANDARD)
    placed_ms = 2
    assert tasks.place([group(urgent_waiting=1)], placed_ms + DISPLACE_AFTER_MS - 1) == []
    late_ms = placed_ms + DISPLACE_AFTER_MS - 1 + LOOK_EVERY_MS
    assert names(tasks.place([group(urgent_waiting=1)], late_ms), GiveBack) == ["old1"]


@pytest.mark.parametrize("tier", [Tier.BATCH, Tier.STANDARD])
def test_a_group_of_one_kind_of_tasks_is_left_to_its_scheduler(tier: Tier) -> None:
    tasks = grown(tier, tier, tier)
    assert tasks.place([group(urgent_waiting=1)], LATE_MS) == []


def served(tasks: TaskPool, groups: list[OpenGroup], now_ms: int) -> list[str]:
    """Place, and return at once whom the pool asks back; returns these."""
    effects = tasks.place(groups, now_ms)
    taken = names(effects, GiveBack)
    for name in taken:
        attempt = tasks.tasks[TaskId(name)].attempt
        tasks.returned(ZERO, returned(TaskId(name), attempt, 7), now_ms)
    return taken


def test_an_aged_batch_task_goes_on_under_steady_urgent_load() -> None:
    tasks, groups = pool(), [group()]
    tasks.change_bounds(QueueBounds(1_000), ageing_ms=1_000)
    tasks.submit(submit("old", prompt=PROMPT, tier=Tier.BATCH), 0)
    running: dict[str, int] = {}
    taken: list[str] = []
    number = 0
    for now_ms in range(0, 60_000, 20):
        while tasks.tasks.queue.count(Tier.INTERACTIVE) < 20:
            tasks.submit(submit(f"i{number}", prompt=PROMPT, tier=Tier.INTERACTIVE), now_ms)
            number += 1
        for name in [name for name, until_ms in running.items() if until_ms <= now_ms]:
            del running[name]
            tasks.release(TaskId(name), is_done=True)
        taken += served(tasks, groups, now_ms)
        placed = [str(each.id) for each in tasks.tasks if each.state is State.PLACED]
        running = {name: running.get(name, now_ms + 2_000) for name in placed if name != "old"}
    assert len(taken) < 3, "it has its turn, and keeps it"
    assert state(tasks, TaskId("old")) is State.PLACED


def test_a_task_that_has_made_room_makes_room_last() -> None:
    """The task of a tenant that has only one is placed before those of others each time."""
    tasks, groups = pool(), [group()]
    tasks.change_bounds(QueueBounds(1_000), ageing_ms=10**9)
    for number in range(20):
        tasks.submit(submit(f"many{number}", prompt=PROMPT, tier=Tier.BATCH, tenant="a"), 0)
    tasks.place(groups, 0)
    tasks.submit(submit("light", prompt=PROMPT, tier=Tier.BATCH, tenant="b"), 1)
    tasks.release(TaskId("many0"), is_done=True)
    tasks.place(groups, 10)
    taken: list[str] = []
    for turn in range(12):
        now_ms = 1_000 * (turn + 1)
        tasks.submit(submit(f"u{turn}", prompt=PROMPT, tier=Tier.INTERACTIVE), now_ms)
        taken += served(tasks, groups, now_ms + DISPLACE_AFTER_MS)
        tasks.release(TaskId(f"u{turn}"), is_done=True)
        tasks.place(groups, now_ms + LATE_MS // 2)
    assert len(taken) == 12
    assert taken.count("light") < 6


def test_tasks_that_no_group_reaches_hide_no_others() -> None:
    tasks, _ = cell(Tier.BATCH, Tier.BATCH, Tier.BATCH)
    tasks.change_bounds(QueueBounds(1_000), ageing_ms=10**9)
    groups = [group(cut_off="tcp://gone")]
    for number in range(2 * LOOK_AHEAD_TASKS):
        far = submit(f"f{number}", prompt=PROMPT, tier=Tier.INTERACTIVE, reply_to="tcp://gone")
        tasks.submit(far, 0)
    tasks.submit(submit("near", prompt=PROMPT, tier=Tier.INTERACTIVE), 1)
    tasks.place(groups, LATE_MS)
    assert state(tasks, TaskId("near")) is State.PLACED


def test_no_room_is_made_that_another_would_claim() -> None:
    tasks, groups = cell(Tier.STANDARD, Tier.BATCH, Tier.STANDARD)
    tasks.submit(submit("big", prompt=100, tier=Tier.INTERACTIVE), 0)
    tasks.submit(submit("small", prompt=PROMPT, tier=Tier.INTERACTIVE), 1)
    assert tasks.place(groups, LATE_MS) == []


def test_a_burst_gets_room_by_one_look() -> None:
    tasks, groups = cell(Tier.BATCH, Tier.BATCH, Tier.BATCH)
    for name in ("a", "b"):
        tasks.submit(submit(name, prompt=PROMPT, tier=Tier.INTERACTIVE), 0)
    effects = tasks.place(groups, LATE_MS)
    assert names(effects, GiveBack) == ["old2", "old1"]
    assert names(effects, Place) == ["a", "b"]

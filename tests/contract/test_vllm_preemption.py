"""Which tasks keep their KV where it runs short: all but those of batch, in vLLM's scheduler."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from coordinator.protocol.terms import Tier
from gateway.admission.tiers import PRIORITY_OF_TIER
from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    BUDGET,
    base_config,
    finish,
    fresh,
    hasher_of,
    restored,
    scheduler_of,
    states_of,
    step,
)
from worker.engine.scheduling.preemption import yields
from worker.engine.scheduling.scheduler import AsyncModeScheduler

PROMPT = BLOCK - 4
"""The answer's fifth token needs a second block."""
TILL_FULL = 5
"""Steps until each task has used up its first block."""


@pytest.fixture(scope="module")
def base() -> Any:
    return base_config()


def prompt_of(name: str, tokens: int) -> list[int]:
    """A prompt that shares no prefix with another's."""
    return [sum(map(ord, name)), *range(tokens - 1)]


def add(scheduler: Any, name: str, tier: Tier, tokens: int = PROMPT, **how: bool) -> None:
    request = fresh(name, prompt_of(name, tokens), hasher_of(scheduler.vllm_config))
    request.priority = PRIORITY_OF_TIER[tier]
    scheduler.add_task(request, [], **how)


def names(tasks: Iterable[Any]) -> list[str]:
    return [each.request_id for each in tasks]


def crowded(base: Any, *tiers: Tier, promoted: int | None = None) -> Any:
    """A scheduler whose tasks, named by their order, all need another block next, and find one."""
    scheduler = scheduler_of(base, 1)
    for number, tier in enumerate(tiers):
        add(scheduler, str(number), tier, is_promoted=number == promoted)
    for _ in range(TILL_FULL):
        step(scheduler)
    assert scheduler.blocks_free == 1
    return scheduler


def test_a_batch_task_is_preempted_before_an_urgent_one_that_came_later(base: Any) -> None:
    scheduler = crowded(base, Tier.BATCH, Tier.BATCH, Tier.INTERACTIVE)
    ran = step(scheduler)
    assert ran == {"0": 1, "2": 1}
    assert names(scheduler.waiting) == ["1"]


def test_the_newest_is_preempted_where_all_are_of_one_tier(base: Any) -> None:
    scheduler = crowded(base, Tier.STANDARD, Tier.STANDARD, Tier.STANDARD)
    assert step(scheduler).keys() == {"0", "1"}
    assert names(scheduler.waiting) == ["2"]


def test_an_urgent_task_gets_the_next_room_before_a_batch_task_that_had_it(base: Any) -> None:
    scheduler = crowded(base, Tier.BATCH, Tier.BATCH, Tier.STANDARD)
    step(scheduler)
    add(scheduler, "3", Tier.STANDARD)
    add(scheduler, "4", Tier.INTERACTIVE)
    scheduler.take_back(["0"])
    assert step(scheduler).keys() == {"2", "3", "4"}
    assert names(scheduler.waiting) == ["1"]


def test_the_order_stays_while_there_are_blocks(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "0", Tier.BATCH)
    step(scheduler)
    add(scheduler, "1", Tier.INTERACTIVE)
    step(scheduler)
    step(scheduler)
    assert names(scheduler.running) == ["0", "1"]


def test_tasks_with_a_step_in_flight_are_ordered_too(base: Any) -> None:
    scheduler = scheduler_of(base, 1, kind=AsyncModeScheduler)
    for number, tier in enumerate((Tier.BATCH, Tier.BATCH, Tier.INTERACTIVE)):
        add(scheduler, str(number), tier)
    plans = [scheduler.plan_step(lambda: None)]
    while len(scheduler.running) == 3:
        plans.append(scheduler.plan_step(lambda: None))
        finish(scheduler, plans.pop(0))
    assert names(scheduler.running) == ["2", "0"]
    while plans:
        finish(scheduler, plans.pop(0))
    assert step(scheduler).keys() >= {"2"}


def test_a_task_that_was_placed_for_its_age_is_preempted_as_others(base: Any) -> None:
    scheduler = crowded(base, Tier.BATCH, Tier.BATCH, Tier.INTERACTIVE, promoted=1)
    assert step(scheduler).keys() == {"1", "2"}
    scheduler = crowded(base, Tier.BATCH, Tier.INTERACTIVE, Tier.INTERACTIVE, promoted=0)
    assert step(scheduler).keys() == {"0", "1"}


def moved(old: Any) -> Any:
    """A scheduler that goes on with another's tasks, each of which has one block."""
    new = scheduler_of(old.vllm_config)
    hasher = hasher_of(old.vllm_config)
    tasks = [
        (restored(name, prompt_of(name, PROMPT), state, hasher), np.array([4 + number]))
        for number, (name, state) in enumerate(states_of(old).items())
    ]
    new.adopt(tasks, [], np.array([1]), np.array([]))
    return new


def test_it_stays_so_where_another_group_goes_on_with_it(base: Any) -> None:
    old = scheduler_of(base, 1, 2)
    for name, is_promoted in (("aged", True), ("young", False)):
        add(old, name, Tier.BATCH, is_promoted=is_promoted)
    step(old)
    assert {name: yields(each) for name, each in moved(old).requests.items()} == {
        "aged": False,
        "young": True,
    }


def test_a_large_batch_task_does_not_keep_an_urgent_one_from_room_that_suffices(base: Any) -> None:
    scheduler = scheduler_of(base, 1, 2)
    add(scheduler, "running", Tier.BATCH, 2 * BLOCK)
    step(scheduler)
    add(scheduler, "large", Tier.BATCH, 7 * BLOCK)
    assert step(scheduler) == {"running": 1}, "it waits for all its blocks"
    add(scheduler, "urgent", Tier.INTERACTIVE, BLOCK)
    assert step(scheduler)["urgent"] == BLOCK


def test_a_long_urgent_prompt_leaves_decodes_of_other_tiers_their_turn(base: Any) -> None:
    scheduler = scheduler_of(base, 1, 2)
    add(scheduler, "standard", Tier.STANDARD, BLOCK)
    add(scheduler, "batch", Tier.BATCH, BLOCK)
    step(scheduler)
    add(scheduler, "long", Tier.INTERACTIVE, BUDGET + 2 * BLOCK)
    step(scheduler)
    assert "standard" in step(scheduler)


def test_vllms_own_order_by_priority_stays(base: Any) -> None:
    config = base_config("--scheduling-policy", "priority")
    scheduler = crowded(config, Tier.BATCH, Tier.INTERACTIVE, Tier.BATCH)
    add(scheduler, "3", Tier.BATCH)
    add(scheduler, "4", Tier.INTERACTIVE)
    assert "1" in step(scheduler)
    scheduler.take_back(["0"])
    assert "4" in step(scheduler)


def test_of_tasks_that_came_with_all_blocks_in_use_a_batch_task_loses_its_own(base: Any) -> None:
    old = scheduler_of(base, 1)
    for number, tier in enumerate((Tier.BATCH, Tier.INTERACTIVE, Tier.BATCH, Tier.INTERACTIVE)):
        add(old, str(number), tier)
    for _ in range(TILL_FULL):
        step(old)
    new = moved(old)
    assert new.blocks_free == 0
    assert not step(new)
    assert names(new.waiting) == ["2"]
    assert step(new)

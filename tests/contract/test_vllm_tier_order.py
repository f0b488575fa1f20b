"""Which tasks keep their KV where it runs short: those of urgent tiers, in vLLM's scheduler."""

from typing import Any

import pytest

from coordinator.protocol.terms import Tier
from gateway.admission.tiers import PRIORITY_OF_TIER
from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    base_config,
    fresh,
    hasher_of,
    scheduler_of,
    step,
)

PROMPT = BLOCK - 4
"""The answer's fifth token needs a second block."""
TILL_FULL = 5
"""Steps until each task has used up its first block."""


@pytest.fixture(scope="module")
def base() -> Any:
    return base_config()


def add(scheduler: Any, name: str, tier: Tier, tokens: int = PROMPT) -> None:
    """Add a task whose prompt shares no prefix with another's."""
    prompt = [sum(map(ord, name)), *range(tokens - 1)]
    request = fresh(name, prompt, hasher_of(scheduler.vllm_config))
    request.priority = PRIORITY_OF_TIER[tier]
    scheduler.add_task(request, [])


def names(tasks: Any) -> list[str]:
    return [each.request_id for each in tasks]


def crowded(base: Any, *tiers: Tier) -> Any:
    """A scheduler whose tasks, named by their order, all need another block next, and find one."""
    scheduler = scheduler_of(base, 1)
    for number, tier in enumerate(tiers):
        add(scheduler, str(number), tier)
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
    assert step(scheduler).keys() == {"2", "4", "3"}
    assert names(scheduler.waiting) == ["1"]


def test_the_order_stays_while_there_are_blocks(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "0", Tier.BATCH)
    add(scheduler, "1", Tier.INTERACTIVE)
    step(scheduler)
    step(scheduler)
    assert names(scheduler.running) == ["0", "1"]

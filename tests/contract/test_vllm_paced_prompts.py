"""Prompts beside decodes, read at the pace at which a step hides its loans: vLLM's scheduler."""

from typing import Any

import pytest

from tests.harness.vllm.mode_schedulers import (
    BUDGET,
    base_config,
    finish,
    fresh,
    hasher_of,
    scheduler_of,
    step,
)

PACE = 40


@pytest.fixture(scope="module")
def base() -> Any:
    return base_config()


def paced(scheduler: Any, pace_tokens: int | None = PACE) -> dict[str, int]:
    return finish(scheduler, scheduler.plan_step(lambda: None, pace_tokens))


def add(scheduler: Any, name: str, tokens: int) -> None:
    """Add a task whose prompt shares no prefix with another's."""
    prompt = [sum(map(ord, name)), *range(tokens - 1)]
    scheduler.add_task(fresh(name, prompt, hasher_of(scheduler.vllm_config)), [])


def test_nothing_is_paced_while_no_task_decodes(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "first", 150)
    assert paced(scheduler) == {"first": BUDGET}
    assert paced(scheduler) == {"first": 150 - BUDGET}


def test_prompts_fill_the_step_up_to_the_pace_until_they_are_read(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "first", 20)
    step(scheduler)
    add(scheduler, "second", 100)
    add(scheduler, "third", 20)
    steps = [paced(scheduler) for _ in range(4)]
    assert steps == [
        {"first": 1, "second": PACE - 1},
        {"first": 1, "second": PACE - 1},
        {"first": 1, "second": 22, "third": PACE - 23},
        {"first": 1, "second": 1, "third": 3},
    ]
    assert paced(scheduler, None).keys() == {"first", "second", "third"}


def test_the_limit_is_back_after_the_step(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "first", 20)
    step(scheduler)
    add(scheduler, "second", 100)
    paced(scheduler)
    assert paced(scheduler, None) == {"first": 1, "second": 100 - (PACE - 1)}


def test_a_pace_above_the_largest_step_changes_nothing(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "first", 20)
    step(scheduler)
    add(scheduler, "second", 200)
    assert paced(scheduler, 10 * BUDGET) == {"first": 1, "second": BUDGET - 1}


def test_prompts_keep_half_the_pace_however_many_tasks_decode(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    for number in range(6):
        add(scheduler, f"short{number}", 4)
    step(scheduler)
    add(scheduler, "long", 60)
    assert paced(scheduler, 4) == {**{f"short{n}": 1 for n in range(6)}, "long": 2}


def test_decodes_go_before_a_long_prompt_that_another_group_began(base: Any) -> None:
    scheduler = scheduler_of(base, *range(1, 9))
    add(scheduler, "first", 4)
    add(scheduler, "second", 4)
    step(scheduler)
    add(scheduler, "long", 200)
    assert paced(scheduler)["long"] == PACE - 2
    scheduler.running.sort(key=lambda each: each.request_id != "long")
    assert paced(scheduler) == {"first": 1, "second": 1, "long": PACE - 2}

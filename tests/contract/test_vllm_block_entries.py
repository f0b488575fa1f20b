"""A full block has its entry before the token after it goes out, whichever scheduler plans."""

from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    PAGES,
    directory_of,
    finish,
    fresh,
    ids,
    oldest,
    sampling,
    scheduler_of,
)
from worker.engine.scheduling.scheduler import AsyncModeScheduler, ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan

PROMPT_TOKENS = (30, 45, 64)


@pytest.mark.parametrize(("kind", "ahead"), [(ModeScheduler, 0), (AsyncModeScheduler, 1)])
def test_all_full_blocks_of_sent_tokens_are_entered(
    base: VllmConfig, hasher: Any, kind: type[ModeScheduler], ahead: int
) -> None:
    scheduler = scheduler_of(base, *range(1, PAGES), kind=kind)
    directory = directory_of(scheduler)
    for number, count in enumerate(PROMPT_TOKENS):
        prompt = [100 * number + each for each in range(count)]
        scheduler.add_task(fresh(f"task-{number}", prompt, hasher), [])
    inflight: deque[tuple[StepPlan, set[str]]] = deque()
    seen = 0
    while scheduler.requests:
        plan, samples = oldest(scheduler, inflight, ahead)
        finish(scheduler, plan, samples=samples)
        entered = set(directory.entries()[0])
        for name, request in scheduler.requests.items():
            # The newest token has no KV yet.
            computed = min(request.num_tokens - 1, request.num_computed_tokens)
            if not request.num_output_tokens:
                continue
            full = ids(scheduler, name)[: computed // BLOCK]
            assert entered.issuperset(full), (name, request.num_tokens)
            seen += len(full)
    assert seen > 100


@pytest.mark.parametrize("kind", [ModeScheduler, AsyncModeScheduler])
def test_a_group_that_was_left_enters_nothing_more(
    base: VllmConfig, hasher: Any, kind: type[ModeScheduler]
) -> None:
    """Its last step may end after that: the pages may be another group's by then."""
    scheduler = scheduler_of(base, *range(1, PAGES), kind=kind)
    directory = directory_of(scheduler)
    scheduler.add_task(fresh("a", list(range(2 * BLOCK)), hasher), [])
    plan = scheduler.plan_step(lambda: None)
    samples = sampling(scheduler, plan)
    scheduler.leave_to_others(["a"])
    scheduler.withdraw()
    finish(scheduler, plan, samples=samples, tidies=False)
    assert not len(directory.entries()[0])

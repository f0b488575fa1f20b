"""A token that its task's last block has room for changes nothing but counts: vLLM agrees."""

import random
from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.v1.request import RequestStatus

from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    PAGES,
    directory_of,
    finish,
    fresh,
    ids,
    oldest,
    scheduler_of,
)
from worker.engine.scheduling import scheduler as scheduler_module
from worker.engine.scheduling.quick_slots import use_quick_slots
from worker.engine.scheduling.scheduler import AsyncModeScheduler, ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan

STEPS = 70


def ran(
    base: VllmConfig, hasher: Any, seed: int, lookahead: int, kind: type[ModeScheduler], ahead: int
) -> tuple[list[Any], int]:
    """What steps of random tasks come to, and how often vLLM's own way was taken."""
    draw = random.Random(seed)
    scheduler = scheduler_of(base, *range(1, PAGES // 2), kind=kind)
    directory = directory_of(scheduler)
    scheduler.look_ahead(lookahead)
    inflight: deque[tuple[StepPlan, set[str]]] = deque()
    manager, found, asked = scheduler.kv_cache_manager, list[Any](), 0
    blocks_needed = manager.coordinator.get_num_blocks_to_allocate

    def counted(*args: Any, **kwargs: Any) -> int:
        nonlocal asked
        asked += 1
        needed: int = blocks_needed(*args, **kwargs)
        return needed

    manager.coordinator.get_num_blocks_to_allocate = counted
    for number in range(STEPS):
        if number % 5 == 0:
            prompt = [draw.randrange(9) for _ in range(draw.randrange(1, 3 * BLOCK))]
            scheduler.add_task(fresh(f"t{number}", prompt, hasher), [])
        if number % 20 == 19 and scheduler.requests:
            scheduler.take_back([draw.choice([*scheduler.requests])])
        plan, samples = oldest(scheduler, inflight, ahead)
        computed = finish(scheduler, plan, draw.randrange(9), samples)
        pool = manager.block_pool
        found.append((
            computed,
            {name: ids(scheduler, name) for name in scheduler.requests},
            sorted(name for name, each in scheduler.requests.items()
                   if each.status == RequestStatus.PREEMPTED),
            pool.get_num_free_blocks(),
            {block.block_id: block.block_hash for block in pool.blocks if block.block_hash},
            dict(manager.coordinator.single_type_managers[0].num_cached_block),
            sorted(directory.entries()[0]),
        ))  # fmt: skip
    return found, asked


@pytest.mark.parametrize(
    ("kind", "ahead", "asked_max"), [(ModeScheduler, 0, 0.4), (AsyncModeScheduler, 1, 0.45)]
)
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_steps_are_those_of_vllm(
    base: VllmConfig,
    hasher: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_caching: bool,
    lookahead: int,
    kind: type[ModeScheduler],
    ahead: int,
    asked_max: float,
) -> None:
    """With tasks that begin, end, fill blocks and are preempted."""
    monkeypatch.setattr(base.cache_config, "enable_prefix_caching", is_caching)
    given = lookahead, kind, ahead
    quick = [ran(base, hasher, seed, *given) for seed in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "use_quick_slots", lambda _manager: None)
        own = [ran(base, hasher, seed, *given) for seed in range(6)]
    assert [each for each, _ in quick] == [each for each, _ in own]
    assert any(preempted for steps, _ in own for _, _, preempted, *_ in steps)
    assert sum(asked for _, asked in quick) < asked_max * sum(asked for _, asked in own)


def test_a_cell_with_other_attention_keeps_vllms_way(
    base: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks outside of a window are freed as a task goes on."""
    plain: ModeScheduler = scheduler_of(base, 1)
    (only,) = plain.kv_cache_manager.coordinator.single_type_managers
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "use_quick_slots", lambda _manager: None)
        manager = scheduler_of(base, 1).kv_cache_manager
    (windowed,) = manager.coordinator.single_type_managers
    windowed.__class__ = type("Windowed", (type(only),), {})
    use_quick_slots(manager)
    assert "allocate_slots" not in vars(manager)
    assert "allocate_slots" in vars(plain.kv_cache_manager)

"""A scheduler's tasks hit blocks that the process before its own has filled."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from kvadaptor.group_directory import GroupDirectory
from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    PAGES,
    directory_of,
    fresh,
    ids,
    scheduler_of,
    step,
)
from worker.engine.scheduling.inherited_blocks import inherit_blocks
from worker.engine.scheduling.scheduler import ModeScheduler

PROMPT = list(range(100, 180))
FULL = len(PROMPT) // BLOCK * BLOCK


@pytest.fixture
def ended(base: VllmConfig, hasher: Any) -> tuple[GroupDirectory, list[int]]:
    """The directory that a process leaves which has read a prompt, and the prompt's full blocks."""
    scheduler = scheduler_of(base, *range(1, PAGES))
    directory = directory_of(scheduler)
    scheduler.add_task(fresh("old", PROMPT, hasher), [])
    step(scheduler)
    return directory, ids(scheduler, "old")[: FULL // BLOCK]


def next_scheduler(base: VllmConfig, *indices: int) -> tuple[ModeScheduler, GroupDirectory]:
    scheduler = scheduler_of(base, *indices)
    return scheduler, directory_of(scheduler)


def inherited_from(directory: GroupDirectory) -> dict[int, bytes]:
    directory.take_over(0)
    return directory.take_inherited()


def test_a_prompt_is_not_computed_again(
    base: VllmConfig, hasher: Any, ended: tuple[GroupDirectory, list[int]]
) -> None:
    keys, (_, blocks) = inherited_from(ended[0]), ended
    assert sorted(keys) == sorted(blocks)
    scheduler, directory = next_scheduler(base, *range(1, PAGES))
    free = scheduler.blocks_free
    assert sorted(inherit_blocks(scheduler, keys)) == sorted(blocks)
    assert sorted(directory.entries()[0]) == sorted(blocks), (
        "the next process may inherit them, too"
    )
    assert scheduler.blocks_free == free, "others may have them, if need be"
    scheduler.add_task(fresh("new", PROMPT, hasher), [])
    assert step(scheduler) == {"new": len(PROMPT) - FULL}
    assert ids(scheduler, "new")[: len(blocks)] == blocks
    assert set(blocks) <= set(directory.entries()[0])


def test_other_blocks_are_used_first(
    base: VllmConfig, hasher: Any, ended: tuple[GroupDirectory, list[int]]
) -> None:
    keys = inherited_from(ended[0])
    scheduler, _ = next_scheduler(base, *range(1, PAGES))
    inherit_blocks(scheduler, keys)
    scheduler.add_task(fresh("other", [7] * 90, hasher), [])
    step(scheduler)
    assert set(ids(scheduler, "other")).isdisjoint(keys)


def test_beginnings_of_prompts_are_used_last(
    base: VllmConfig, hasher: Any, ended: tuple[GroupDirectory, list[int]]
) -> None:
    """Without its beginning, the rest of a prompt cannot be hit."""
    keys, (_, blocks) = inherited_from(ended[0]), ended
    scheduler, _ = next_scheduler(base, *range(1, PAGES))
    inherit_blocks(scheduler, keys)
    scheduler.kv_cache_manager.block_pool.get_new_blocks(scheduler.blocks_free - 1)
    (last,) = scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    assert last.block_id == blocks[0]


def test_blocks_that_are_not_granted_or_in_use_are_passed_over(
    base: VllmConfig, hasher: Any, ended: tuple[GroupDirectory, list[int]]
) -> None:
    keys = inherited_from(ended[0])
    scheduler, _ = next_scheduler(base, PAGES - 1)
    assert inherit_blocks(scheduler, keys) == []
    scheduler.grant(np.arange(1, PAGES))
    scheduler.add_task(fresh("first", [7] * 300, hasher), [])
    while scheduler.blocks_free > 0 and step(scheduler).get("first", 0) > 1:
        pass
    in_use = set(ids(scheduler, "first"))
    assert set(inherit_blocks(scheduler, keys)) == set(keys) - in_use

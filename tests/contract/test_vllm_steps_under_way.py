"""A task is told, moves and ends while a step of it is under way, in a real vLLM scheduler."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.config import VllmConfig

from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    BUDGET,
    PROMPT,
    finish,
    fresh,
    ids,
    restored,
    scheduler_of,
    states_of,
    step,
)
from worker.engine.scheduling.handover import go_on


def test_a_task_is_told_as_it_will_be_behind_the_step_under_way(
    base: VllmConfig, hasher: Any
) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", PROMPT, hasher), [])
    step(old)
    under_way = old.plan_step(lambda: None)
    state = states_of(old)["a"]
    assert (state.computed, state.settled, state.tokens()) == (81, 80, [7])
    written = old.written_blocks().tolist()
    assert written == ids(old, "a")[80 // BLOCK :], "the block of token 80"
    assert len(written) < len(ids(old, "a"))
    finish(old, under_way, token=9)
    assert old.written_blocks().size == 0
    assert old.tokens_since({"a": state.count}) == {"a": [9]}
    moved = restored("a", PROMPT, state, hasher)
    go_on(moved, old.tokens_since({"a": state.count})["a"])
    assert list(moved.output_token_ids) == [7, 9]
    assert moved.block_hashes == old.requests["a"].block_hashes
    new.adopt([(moved, np.array([9, 10, 11]))], [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    assert step(new) == {"a": 1}


def test_a_chunk_of_a_prompt_brings_no_token(base: VllmConfig, hasher: Any) -> None:
    old = scheduler_of(base, 1, 2)
    old.add_task(fresh("a", list(range(150)), hasher), [])
    under_way = old.plan_step(lambda: None)
    state = states_of(old)["a"]
    assert (state.computed, state.settled) == (BUDGET, 0)
    assert old.written_blocks().tolist() == ids(old, "a")[: -(-BUDGET // BLOCK)]
    finish(old, under_way)
    assert old.tokens_since({"a": state.count}) == {"a": []}


def test_blocks_that_a_step_under_way_writes_are_not_free_before_its_end(
    base: VllmConfig, hasher: Any
) -> None:
    old = scheduler_of(base, 1, 2)
    for name in ("a", "b"):
        old.add_task(fresh(name, list(range(100, 133)), hasher), [])
    step(old)
    under_way = old.plan_step(lambda: None)
    blocks, states = ids(old, "a"), list(states_of(old).values())
    old.take_back(["a"])
    assert [old.frees_after_step] == [True]
    assert set(blocks) <= set(old.written_blocks().tolist())
    assert set(blocks) <= set(old.held_blocks()), "nobody else may have them yet"
    finish(old, under_way)
    assert not old.frees_after_step
    assert not set(blocks[1:]) & set(old.held_blocks())
    assert list(old.tokens_since({each.task: each.count for each in states})) == ["b"], (
        "an ended task has no tokens here"
    )


def test_a_step_that_will_never_end_holds_no_blocks(base: VllmConfig, hasher: Any) -> None:
    old = scheduler_of(base, 1, 2)
    old.add_task(fresh("a", PROMPT, hasher), [])
    free = old.grants.free
    old.plan_step(lambda: None)
    old.take_back(["a"])
    assert old.frees_after_step
    old.forget_steps()
    assert (old.frees_after_step, old.grants.free) == (False, free)
    old.add_task(fresh("b", PROMPT[::-1], hasher), [])
    assert step(old) == {"b": 80}
    old.take_back(["b"])
    assert (old.frees_after_step, old.grants.free) == (False, free)


def test_blocks_that_a_step_fills_for_two_tasks_are_not_full_before_its_end(
    base: VllmConfig, hasher: Any
) -> None:
    """The second task hits what the first one computes in the same step."""
    old = scheduler_of(base, 1, 2)
    for name, more in (("a", 1), ("b", 2)):
        old.add_task(fresh(name, [*PROMPT[:40], more], hasher), [])
    under_way = old.plan_step(lambda: None)
    assert under_way.output.num_scheduled_tokens == {"a": 41, "b": 9}
    assert states_of(old)["b"].settled == BLOCK, "vLLM counts them as computed"
    assert states_of(old)["b"].full_blocks(BLOCK, old.written_blocks()).size == 0
    finish(old, under_way)
    state = states_of(old)["b"]
    assert state.full_blocks(BLOCK, old.written_blocks()).tolist() == ids(old, "b")[:1]

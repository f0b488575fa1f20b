"""A running task goes on in a real vLLM scheduler: blocks, hashes, prefix hits, what is reused."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.config import VllmConfig

from coordinator.protocol.prefixes import prefix_hashes
from tests.harness.vllm.mode_schedulers import (
    BLOCK,
    BUDGET,
    PROMPT,
    WIDTH,
    finish,
    fresh,
    ids,
    restored,
    scheduler_of,
    states_of,
    step,
)
from worker.engine.scheduling.handover import FinishedChains, forget_hashes, restore
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.rank.task_state import CachedChain, prefixes_of


def test_a_task_goes_on_with_its_next_token(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", PROMPT, hasher), [])
    assert step(old) == {"a": 80}
    assert step(old) == {"a": 1}
    state = states_of(old)["a"]
    assert (state.computed, state.tokens(), state.blocks.size) == (81, [7, 7], 3)
    blocks = np.array([13, 9, 10])
    new.adopt([(restored("a", PROMPT, state, hasher), blocks)], [], np.array([2, 3]), np.array([]))
    assert new.holding() == ["a"]
    assert ids(new, "a") == [13, 9, 10]
    assert all(new.kv_cache_manager.block_pool.blocks[number].ref_cnt == 1 for number in blocks)
    new.grant(np.array([2, 3]))
    assert new.grants.free == 8 - 3
    assert step(new) == {"a": 1}, "nothing is computed again"
    assert new.requests["a"].output_token_ids[:] == [7, 7, 7]
    assert list(new.requests["a"].block_hashes) == state.hashes


@pytest.mark.parametrize("steps", [1, 20])
def test_a_request_that_was_built_early_catches_up(
    base: VllmConfig, hasher: Any, steps: int
) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", PROMPT, hasher), [])
    step(old)
    request = restored("a", PROMPT, states_of(old)["a"], hasher)
    for _ in range(steps):
        step(old)
    state = states_of(old)["a"]
    restore(request, state, request._block_hasher)
    at_once = restored("a", PROMPT, state, hasher)
    for name in ("_all_token_ids", "_output_token_ids", "num_computed_tokens", "block_hashes"):
        assert getattr(request, name) == getattr(at_once, name), name
    blocks = np.arange(9, 9 + state.blocks.size)
    new.adopt([(request, blocks)], [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    for _ in range(25):
        assert step(new) == step(old) == {"a": 1}
    assert new.requests["a"].block_hashes == old.requests["a"].block_hashes


def test_a_task_goes_on_in_blocks_that_it_had_in_advance(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.look_ahead(BLOCK)
    old.add_task(fresh("a", PROMPT, hasher), [])
    assert step(old) == {"a": 80}
    old.look_ahead(0)
    state = states_of(old)["a"]
    assert (state.computed, state.blocks.size) == (80, 4)
    blocks = np.array([13, 9, 10, 11])
    new.adopt([(restored("a", PROMPT, state, hasher), blocks)], [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    plan = new.plan_step(lambda: None)
    assert plan.output.scheduled_new_reqs[0].block_ids == ([13, 9, 10, 11],)
    assert finish(new, plan) == {"a": 1}
    for _ in range(4 * BLOCK - 80 - 2):
        assert step(new) == {"a": 1}
    assert ids(new, "a") == blocks.tolist()
    hashed = [new.kv_cache_manager.block_pool.blocks[number].block_hash for number in blocks]
    assert [each is not None for each in hashed] == [True, True, True, False]


def test_a_prompt_goes_on_where_a_chunk_ended(base: VllmConfig, hasher: Any) -> None:
    prompt = list(range(100, 300))
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", prompt, hasher), [])
    assert step(old) == {"a": BUDGET}
    state = states_of(old)["a"]
    assert (state.computed, state.tokens()) == (BUDGET, [])
    blocks = np.arange(4, 4 + state.blocks.size)
    new.adopt([(restored("a", prompt, state, hasher), blocks)], [], np.array([1, 2]), np.array([]))
    new.grant(np.array([1, 2]))
    assert step(new) == {"a": BUDGET}
    assert step(new) == {"a": 200 - 2 * BUDGET}
    assert new.requests["a"].output_token_ids[:] == [7]


def test_tasks_with_one_prefix_share_blocks_on(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", PROMPT, hasher), [])
    step(old)
    old.add_task(fresh("b", [*PROMPT[:64], *range(40)], hasher), [])
    step(old)
    states = states_of(old)
    assert states["a"].blocks[:2].tolist() == states["b"].blocks[:2].tolist()
    tasks = [
        (restored("a", PROMPT, states["a"], hasher), np.array([8, 9, 10])),
        (restored("b", [*PROMPT[:64], *range(40)], states["b"], hasher), np.array([8, 9, 11, 12])),
    ]
    new.adopt(tasks, [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    pool = new.kv_cache_manager.block_pool
    assert [pool.blocks[number].ref_cnt for number in (8, 9, 10, 11, 12)] == [2, 2, 1, 1, 1]
    new.take_back(["a"])
    assert [pool.blocks[number].ref_cnt for number in (8, 9, 10)] == [1, 1, 0]
    assert step(new) == {"b": 1}


def test_a_new_request_hits_what_came_with_a_task(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", PROMPT, hasher), [])
    step(old)
    state = states_of(old)["a"]
    blocks = np.array([9, 10, 11])
    new.adopt([(restored("a", PROMPT, state, hasher), blocks)], [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    # Registered behind the first step, so that nobody waits for it.
    assert step(new) == {"a": 1}
    new.add_task(fresh("b", [*PROMPT[:64], 1, 2, 3], hasher), [])
    assert step(new) == {"a": 1, "b": 3}
    assert ids(new, "b")[:2] == [9, 10]


def test_blocks_that_came_with_two_tasks_are_registered_once(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    prompts = {"a": PROMPT, "b": [*PROMPT[:64], *range(900, 970)]}
    for name, prompt in prompts.items():
        old.add_task(fresh(name, prompt, hasher), [])
        step(old)
    states = states_of(old)
    lie = {"a": np.array([9, 10, 11]), "b": np.array([9, 10, 12, 13, 14])}
    tasks = [(restored(n, prompts[n], states[n], hasher), lie[n]) for n in prompts]
    new.adopt(tasks, [], np.array([2, 3, 4]), np.array([]))
    new.grant(np.array([2, 3, 4]))
    for _ in range(3):
        step(new)
    pool = new.kv_cache_manager.block_pool
    assert {b for b in range(len(pool.blocks)) if pool.blocks[b].block_hash} == {9, 10, 12, 13}
    for _ in range(BLOCK):
        step(new)
    hashed = {b for b in range(len(pool.blocks)) if pool.blocks[b].block_hash}
    assert hashed >= {9, 10, 11, 12, 13, 14}, "what is filled here is registered by vLLM"
    new.add_task(fresh("again", [*prompts["b"][:128], 5], hasher), [])
    assert step(new)["again"] == 1


def test_a_moved_task_may_end_before_its_blocks_are_registered(
    base: VllmConfig, hasher: Any
) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    old.add_task(fresh("a", PROMPT, hasher), [])
    step(old)
    task = restored("a", PROMPT, states_of(old)["a"], hasher)
    new.adopt([(task, np.array([9, 10, 11]))], [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    new.take_back(["a"])
    new.add_task(fresh("b", [*PROMPT[:64], 1, 2, 3], hasher), [])
    assert step(new) == {"b": 67}
    assert new.grants.free == new.grants.total - len(ids(new, "b"))


def test_tasks_that_go_on_elsewhere_hold_nothing_at_once(base: VllmConfig, hasher: Any) -> None:
    scheduler = scheduler_of(base, 1, 2)
    for name in ("a", "b"):
        scheduler.add_task(fresh(name, [*PROMPT[:40], ord(name)], hasher), [])
        step(scheduler)
    scheduler.leave_to_others(["a", "never here"])
    assert scheduler.holding() == ["b"]
    assert scheduler.not_holding() == []
    kept = scheduler.withdraw()
    assert kept.tolist() == sorted({block // WIDTH for block in ids(scheduler, "b")})
    scheduler.leave_to_others(["b"])
    assert scheduler.withdraw().size == 0
    scheduler.tidy()
    assert not scheduler.requests
    scheduler.grant(np.array([1, 2]))
    assert scheduler.grants.free == scheduler.grants.total == 2 * WIDTH
    scheduler.add_task(fresh("a", PROMPT, hasher), [])
    assert step(scheduler) == {"a": 80}, "its old self and what it had cached are forgotten"


def hashed_blocks(scheduler: ModeScheduler) -> set[int]:
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return {number for number, each in enumerate(blocks) if each.block_hash}


def test_what_a_switch_puts_off_is_done_bit_by_bit(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2, 3), scheduler_of(base)
    prompts = {name: [*PROMPT[:40], ord(name)] for name in "abc"}
    for name, prompt in prompts.items():
        old.add_task(fresh(name, prompt, hasher), [])
        step(old)
    states = states_of(old)
    tasks = [
        (restored(name, prompt, states[name], hasher), np.array([8 + 2 * place, 9 + 2 * place]))
        for place, (name, prompt) in enumerate(prompts.items())
    ]
    old.leave_to_others(prompts)
    assert old.withdraw().size == 0
    left = []
    while not old.tidy(1):
        left.append(len(old.requests))
    assert left == [2, 1]
    assert not old.requests

    new.adopt(tasks, [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    finish(new, new.plan_step(lambda: None), tidies=False)
    assert not hashed_blocks(new), "nobody waits for that"
    assert [new.tidy(1) for _ in prompts] == [False, False, True]
    assert hashed_blocks(new) == {8, 10, 12}


def test_a_group_begins_without_tasks_that_have_gone(base: VllmConfig, hasher: Any) -> None:
    scheduler = scheduler_of(base, 1, 2)
    for name in "abc":
        scheduler.add_task(fresh(name, [*PROMPT[:40], ord(name)], hasher), [])
        step(scheduler)
    scheduler.leave_to_others("abc")
    scheduler.withdraw()
    assert not scheduler.tidy(1)
    scheduler.grant(np.array([1, 2]))
    assert not scheduler.requests
    assert scheduler.tidy(0)


def chain(scheduler: ModeScheduler, name: str, prompt: list[int], hasher: Any) -> CachedChain:
    """Serve a request to its end; returns what is cached of it."""
    scheduler.add_task(fresh(name, prompt, hasher), [])
    step(scheduler)
    scheduler.take_back([name])
    return scheduler.movable(100)[1][0]


def test_progress_says_nothing_of_chains_that_are_gone(base: VllmConfig, hasher: Any) -> None:
    scheduler = scheduler_of(base, 1, 2, 3)
    ended = chain(scheduler, "ended", PROMPT, hasher)
    scheduler.add_task(fresh("a", [*range(40)], hasher), [])
    step(scheduler)
    state = states_of(scheduler)["a"]
    step(scheduler)
    found = scheduler.progress_since([state], [ended])
    assert found is not None and found[0] is not None
    assert found[0].tokens == [7]
    forget_hashes(scheduler.kv_cache_manager.block_pool, ended.blocks.tolist()[-1:])
    assert scheduler.progress_since([state], [ended]) is None
    assert scheduler.progress_since([state], []) is not None


def test_a_chain_is_known_by_the_salt_of_its_request(base: VllmConfig, hasher: Any) -> None:
    scheduler = scheduler_of(base, 1)
    tasks = {salt: fresh(f"s{salt}", PROMPT, hasher, salt) for salt in (None, "one", "two")}
    for salt, task in tasks.items():
        scheduler.add_task(task, [])
        assert step(scheduler) == {task.request_id: len(PROMPT)}, "nothing of the others is hit"
        scheduler.take_back([task.request_id])
        assert scheduler.movable(100)[1][0].prefixes == prefix_hashes(PROMPT, salt)


def test_carried_chains_are_hit_and_the_newest_is_reused_last(
    base: VllmConfig, hasher: Any
) -> None:
    old, new = scheduler_of(base, 1, 2, 3), scheduler_of(base)
    first = chain(old, "first", PROMPT, hasher)
    second = chain(old, "second", list(range(300, 370)), hasher)
    newest, older = old.movable(100)[1]
    assert (newest.hashes, older.hashes) == (second.hashes, first.hashes)
    assert older.prefixes == prefix_hashes(PROMPT), "by which the coordinator knows it"
    assert older.prefix_in(np.array([20]), BLOCK).prefixes == (), "half of the tokens that it names"
    assert prefixes_of([older, newest, older]) == older.prefixes + newest.prefixes
    carried = [
        older.prefix_in(np.array([20, 21]), BLOCK),
        newest.prefix_in(np.array([13, 14]), BLOCK),
    ]
    new.adopt([], carried, np.array([3, 5]), np.array([]))
    new.grant(np.array([3, 5]))
    assert new.grants.free == 8, "what is cached is free"
    pool = new.kv_cache_manager.block_pool
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert order[-4:] == [21, 20, 14, 13]
    assert set(order[:4]) == {12, 15, 22, 23}, "blocks that hold nothing go first"
    new.add_task(fresh("again", [*PROMPT[:64], 5], hasher), [])
    assert step(new) == {"again": 1}
    assert ids(new, "again")[:2] == [20, 21]
    # Told on at the next move.
    told_on = new.movable(100)[1]
    assert [each.hashes for each in told_on] == [newest.hashes, older.hashes]
    assert [each.prefixes for each in told_on] == [newest.prefixes, older.prefixes]


def test_what_blocks_held_before_is_forgotten(base: VllmConfig, hasher: Any) -> None:
    """Another task's KV now lies where this scheduler had cached something."""
    scheduler = scheduler_of(base, 1, 2)
    before = chain(scheduler, "before", PROMPT, hasher)
    scheduler.withdraw()
    other = scheduler_of(base, 1, 2)
    other.add_task(fresh("a", list(range(500, 580)), hasher), [])
    step(other)
    state, prompt = states_of(other)["a"], list(range(500, 580))
    blocks = np.concatenate([before.blocks, [11]])
    task = restored("a", prompt, state, hasher)
    scheduler.adopt([(task, blocks)], [], np.array([1, 2]), np.array([]))
    scheduler.grant(np.array([1, 2]))
    scheduler.add_task(fresh("again", [*PROMPT[:64], 5], hasher), [])
    assert step(scheduler) == {"a": 1, "again": 65}


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_blocks_lose_their_hashes_whether_these_can_be_found_or_not(
    base: VllmConfig, hasher: Any, is_withdrawn: bool
) -> None:
    scheduler = scheduler_of(base, 1, 2)
    scheduler.add_task(fresh("a", PROMPT, hasher), [])
    step(scheduler)
    held = ids(scheduler, "a")
    pool = scheduler.kv_cache_manager.block_pool
    assert sum(pool.blocks[number].block_hash is not None for number in held) == 2
    scheduler.take_back(["a"])
    if is_withdrawn:
        scheduler.withdraw()
    assert bool(len(pool.cached_block_hash_to_block)) is not is_withdrawn
    forget_hashes(pool, held)
    assert not any(pool.blocks[number].block_hash for number in held)
    assert len(pool.cached_block_hash_to_block) == 0


def test_indices_that_a_move_filled_are_kept_or_freed_as_one(base: VllmConfig, hasher: Any) -> None:
    old, new = scheduler_of(base, 1, 2), scheduler_of(base)
    for name, start in (("a", 100), ("b", 300)):
        old.add_task(fresh(name, list(range(start, start + 80)), hasher), [])
        step(old)
    states = states_of(old)
    prompts = {"a": list(range(100, 180)), "b": list(range(300, 380))}
    lie = {"a": np.array([8, 9, 10]), "b": np.array([20, 21, 22])}
    tasks = [(restored(n, prompts[n], states[n], hasher), lie[n]) for n in ("a", "b")]
    moved = np.array([2, 5])
    new.adopt(tasks, [], np.array([2, 4, 5]), moved)
    new.grant(np.array([2, 4, 5]))
    new.take_back(["b"])
    assert new.withdraw().tolist() == [2, 5], "`a` lies in pages of index 2 alone, but of both"
    assert new.holders_of(np.array([4])) == []
    assert new.holders_of(np.array([2])) == ["a"]
    new.take_back(["a"])
    assert new.withdraw().tolist() == []


def test_tasks_that_came_with_all_blocks_in_use_do_not_wait_for_each_other(
    base: VllmConfig, hasher: Any
) -> None:
    new, tasks = scheduler_of(base), []
    for name, start, lie in (("a", 100, [8, 9, 10]), ("b", 300, [11, 12, 13])):
        prompt, old = list(range(start, start + 3 * BLOCK)), scheduler_of(base, 1)
        old.add_task(fresh(name, prompt, hasher), [])
        step(old)
        tasks.append((restored(name, prompt, states_of(old)[name], hasher), np.array(lie)))
    new.adopt(tasks, [], np.array([2, 3]), np.array([]))
    new.grant(np.array([2, 3]))
    pool = new.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(new.grants.free)
    for _ in range(12):
        if step(new):
            break
    assert new.running, "one of them gave up its blocks, so the other goes on"
    pool.free_blocks(taken)
    for _ in range(20):
        step(new)
    assert {name: len(r.output_token_ids) > 3 for name, r in new.requests.items()} == {
        "a": True,
        "b": True,
    }


def test_only_the_last_chains_are_remembered(base: VllmConfig, hasher: Any) -> None:
    scheduler = scheduler_of(base, 1, 2, 3, 4, 5)
    names = [f"task {number}" for number in range(3)]
    for number, name in enumerate(names):
        chain(scheduler, name, list(range(1000 * number, 1000 * number + 70)), hasher)
    assert len(scheduler.movable(100)[1]) == 3
    assert len(scheduler.movable(4)[1]) == 2, "two blocks each, four in all"
    scheduler.withdraw()
    assert scheduler.movable(100)[1] == []
    empty = FinishedChains(32)
    empty.remember([], ())
    assert empty.cached(scheduler.kv_cache_manager.block_pool, 10) == []

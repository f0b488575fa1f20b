"""New tasks as followers get them, and blocks as tasks that have come take them."""

import pickle
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from tests.harness.vllm.mode_schedulers import PAGES, WIDTH, scheduler_of
from worker.engine.scheduling.handover import forget_hashes, touch
from worker.engine.scheduling.new_tasks import NewTasks
from worker.engine.scheduling.step_plan import StepPlan, give_lists

PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=5, seed=3, stop_token_ids=[4], logit_bias={7: 1.5}),
    None,
    SamplingParams(max_tokens=9, bad_words=["a"], extra_args={"b": [1]}, logprobs=2),
)


def _task(name: str, params: SamplingParams | None, **rare: Any) -> NewRequestData:
    known = {"mm_features": [], "pooling_params": None, "lora_request": None, **rare}
    blocks = ([1, len(name)],)
    return NewRequestData(
        name, [1, 2], sampling_params=params, block_ids=blocks, num_computed_tokens=1, **known
    )


def _travelled(*tasks: NewRequestData) -> list[NewRequestData]:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = list(tasks)
    arrived: StepPlan = pickle.loads(pickle.dumps(StepPlan(step, None)))
    assert step.scheduled_new_reqs == list(tasks), "the leader's own plan stays as it is"
    give_lists(arrived.output)
    return list(arrived.output.scheduled_new_reqs)


@pytest.mark.parametrize("first", range(len(PARAMS)))
def test_parameters_reach_followers_exactly(first: int) -> None:
    ordered = [*PARAMS[first:], *PARAMS[:first]]
    tasks = [_task(f"t{number}", params) for number, params in enumerate(ordered)]
    found = [each.sampling_params for each in _travelled(*tasks)]
    assert found == ordered
    names = SamplingParams.__struct_fields__
    for params, own in zip(ordered, found, strict=True):
        if params is None or own is None:
            continue
        pairs = [(getattr(params, name), getattr(own, name)) for name in names]
        assert [type(a) for a, _ in pairs] == [type(b) for _, b in pairs]
        own.max_tokens = -1
    assert sum(each is not None and each.max_tokens == -1 for each in found) == len(PARAMS) - 1
    assert len({id(each) for each in found}) == len(found), "followers change each on its own"


def test_copied_parameters_keep_nothing_that_vllm_found_for_others() -> None:
    """vLLM notes how parameters sample when it is asked first."""
    given = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(seed=1)]
    kinds = [each.sampling_type for each in given]
    assert len(set(kinds)) == len(given)
    packed = NewTasks.of([_task(str(n), each) for n, each in enumerate(given)], {}, {})
    assert [each.sampling_params.sampling_type for each in packed.unpacked()[0]] == kinds


def test_what_few_tasks_have_reaches_followers() -> None:
    # All fields that vLLM may send: a new one travels like the others.
    known = ("req_id", "prompt_token_ids", "prefill_token_ids", "sampling_params")
    own = (*known, "block_ids", "num_computed_tokens")
    rare = {each.name: f"{each.name}!" for each in fields(NewRequestData) if each.name not in own}
    tasks = [_task("a", PARAMS[0]), _task("b", None, **rare), _task("c", PARAMS[2])]
    assert _travelled(*tasks) == tasks


def test_a_step_without_new_tasks_has_none_for_followers() -> None:
    assert _travelled() == []
    assert NewTasks.of([], {}, {}).unpacked() == ([], {})


def test_blocks_are_taken_as_vllm_takes_them(base: VllmConfig) -> None:
    orders = []
    for take in (touch, lambda pool, blocks: pool.touch(blocks)):
        pool = scheduler_of(base, *range(1, PAGES)).kv_cache_manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        # Neighbours, the first and the last one, one twice, and one that another task has.
        for numbers in ([free[0], free[1], free[5], free[-1]], [free[5], free[2], free[3]]):
            take(pool, [pool.blocks[number] for number in numbers])
        assert pool.get_num_free_blocks() == len(free) - 6 == WIDTH * (PAGES - 1) - 6
        taken = pool.blocks[free[5]]
        assert (taken.ref_cnt, taken.prev_free_block, taken.next_free_block) == (2, None, None)
        queue = pool.free_block_queue
        assert queue.fake_free_list_tail.prev_free_block.block_id == free[-2]
        orders.append([block.block_id for block in queue.get_all_free_blocks()])
    assert orders[0] == orders[1] == [*free[4:5], *free[6:-1]]


def test_a_block_loses_its_hash_as_vllm_takes_it(base: VllmConfig) -> None:
    found = []
    for forget in (forget_hashes, lambda pool, numbers: pool.blocks[numbers[0]].reset_hash()):
        pool = scheduler_of(base, 1).kv_cache_manager.block_pool
        block = pool.blocks[WIDTH]
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"one"), 0), num_tokens=32)
        forget(pool, [WIDTH])
        found.append((block.block_hash, block.block_hash_num_tokens))
    assert found == [(None, None)] * 2

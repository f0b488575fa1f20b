"""Real vLLM schedulers of one mode each, without a runner: steps end as the test says."""

from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from comm_pool.layout import Mode
from coordinator.protocol.config import check_config
from kvadaptor.geometry import Split
from kvadaptor.group_directory import DirectoryShape, GroupDirectory
from kvadaptor.views import LAYOUT, KVBuffer
from tests.harness.cells.servers import MODEL
from worker.engine.config import ModeKey, mode_config, replica_config
from worker.engine.scheduling.handover import restore
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan
from worker.rank.task_state import RunningState

BLOCK = 32
WIDTH = 4
PAGES = 10
BUDGET = 96
"""Tokens of one step."""


def base_config(*options: str) -> VllmConfig:
    """Configuration of the demo model."""
    args = ["--dtype", "float32", "--max-model-len", "256", *options]
    config = check_config(
        {
            "model": {
                "path": str(MODEL),
                "served_name": "demo",
                "engine_args": [*args, "--max-num-batched-tokens", str(BUDGET)],
            },
            "cell": {"ranks": 1, "device": "cpu", "layout": "dp1", "widths": [1]},
        }
    )
    made = replica_config(config)
    init_none_hash(get_hash_fn_by_name(made.cache_config.prefix_caching_hash_algo))
    return made


def hasher_of(base: VllmConfig) -> Any:
    """What computes block hashes."""
    hash_fn = get_hash_fn_by_name(base.cache_config.prefix_caching_hash_algo)
    return get_request_block_hasher(BLOCK, hash_fn)


def scheduler_of(
    base: VllmConfig,
    *indices: int,
    pages: int = PAGES,
    kind: type[ModeScheduler] = ModeScheduler,
) -> ModeScheduler:
    """A scheduler of width 4 that may use the blocks of these lease indices."""
    config = mode_config(base, ModeKey(Mode.DP, 1), LAYOUT.name)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
    kv = KVBuffer({"layer": spec}, pages, torch.device("cpu")).config(Split(1, WIDTH))
    config.cache_config.num_gpu_blocks = kv.num_blocks
    with set_current_vllm_config(config):
        made = kind(config, kv, StructuredOutputManager(config), WIDTH)
    if indices:
        made.grant(np.array(indices))
    return made


def directory_of(scheduler: ModeScheduler) -> GroupDirectory:
    """A directory into which the scheduler enters its full blocks from now on."""
    shape = DirectoryShape((0,), PAGES, WIDTH)
    directory = GroupDirectory(memoryview(bytearray(shape.num_bytes)), shape)
    directory.begin(1, [1])
    directory.keep(0, 1, None)
    scheduler.use_directory(directory)
    return directory


def fresh(name: str, prompt: list[int], hasher: Any, salt: str | None = None) -> Request:
    """A greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    return Request(name, prompt, sampling, None, block_hasher=hasher, cache_salt=salt)


def step(scheduler: ModeScheduler, token: int = 7) -> dict[str, int]:
    """Run one step, every finished prompt and decode yielding `token`; returns tokens computed."""
    return finish(scheduler, scheduler.plan_step(lambda: None), token)


def sampling(scheduler: ModeScheduler, plan: StepPlan) -> set[str]:
    """The tasks that get a token from the step that was planned last."""
    tasks = ((name, scheduler.requests.get(name)) for name in plan.output.num_scheduled_tokens)
    return {name for name, each in tasks if each and each.num_computed_tokens >= each.num_tokens}


def finish(
    scheduler: ModeScheduler,
    plan: StepPlan,
    token: int = 7,
    samples: set[str] | None = None,
    *,
    tidies: bool = True,
) -> dict[str, int]:
    """Let a step that is under way end; without `samples` it was planned last."""
    names = list(plan.output.num_scheduled_tokens)
    samples = sampling(scheduler, plan) if samples is None else samples
    sampled = [[token] if each in samples else [] for each in names]
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: number for number, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.finish_step(plan, result)
    if tidies:
        scheduler.tidy()
    return dict(plan.output.num_scheduled_tokens)


def oldest(
    scheduler: ModeScheduler, inflight: deque[tuple[StepPlan, set[str]]], ahead: int
) -> tuple[StepPlan, set[str]]:
    """Plan steps until `ahead` follow the oldest; take that one, and the tasks that get a token."""
    while len(inflight) <= ahead and (scheduler.has_more or not inflight):
        plan = scheduler.plan_step(lambda: None)
        inflight.append((plan, sampling(scheduler, plan)))
    return inflight.popleft()


def states_of(scheduler: ModeScheduler) -> dict[str, RunningState]:
    """What another scheduler could go on with, by task."""
    return {state.task: state for state in scheduler.movable(100)[0]}


def restored(name: str, prompt: list[int], state: RunningState, hasher: Any) -> Request:
    """The request of a task that goes on elsewhere."""
    request = fresh(name, prompt, None)
    restore(request, state, hasher)
    return request


def ids(scheduler: ModeScheduler, name: str) -> list[int]:
    """The blocks of a task."""
    return list(scheduler._blocks_of(name))


PROMPT = list(range(100, 180))

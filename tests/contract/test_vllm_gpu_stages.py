"""What model runner V2 does in a pipeline stage, and what the adapter of stages puts in its place.

The runner needs a GPU; its source, its scheduler and its records of requests do not.
"""

import inspect
import re
from typing import Any

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.pp_utils import PPHandler

from worker.engine.runners.gpu_stage import StepTokens

UPDATE = "update_pp_decode_requests"
OF_SPECULATION = {"configure_aux_hidden_state_relay", "broadcast_drafts"}


class States:
    """What `StepTokens` reads of vLLM's `RequestState`."""

    def __init__(self, prefills: dict[str, int]) -> None:
        self.req_id_to_index = {name: 2 * row + 1 for row, name in enumerate(prefills)}
        self.prefill_len = self
        self.np = np.zeros(2 * len(prefills) + 2, dtype=np.int32)
        for name, row in self.req_id_to_index.items():
            self.np[row] = prefills[name]


def step_of(cached: dict[str, tuple[int, list[int]]]) -> SchedulerOutput:
    """A step of tasks that the runner knows: what they have computed, and their next tokens."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData.make_empty()
    step.scheduled_cached_reqs.req_ids = list(cached)
    step.scheduled_cached_reqs.num_computed_tokens = [each[0] for each in cached.values()]
    step.scheduled_cached_reqs.new_token_ids = [each[1] for each in cached.values()]
    return step


def taken(tokens: StepTokens) -> dict[str, list[Any]] | None:
    found = tokens.get_prev_sampled_outputs(None)
    return found and {name: values.tolist() for name, values in found.items()}


def test_the_runner_finds_all_that_it_asks_a_handler() -> None:
    source = inspect.getsource(GPUModelRunner)
    asked = set(re.findall(r"self\.pp_handler\.(\w+)", source)) - OF_SPECULATION
    assert asked == {
        "broadcast",
        "get_prev_sampled_outputs",
        "on_req_idx_freed",
        "receive",
        "relay_aux_hidden_states",
    }
    for name in asked:
        theirs, ours = (inspect.signature(getattr(each, name)) for each in (PPHandler, StepTokens))
        given = len(theirs.parameters) - 1
        ours.bind(*range(given + 1))
    assert source.count("self.pp_handler = ") == 1, "the constructor alone makes one"


def test_tokens_are_taken_once_and_before_a_step_reads_them() -> None:
    source = inspect.getsource(GPUModelRunner.execute_model)
    first, then = (source.index(f"self.{name}(") for name in (UPDATE, "add_requests"))
    assert first < then and source.count(f"{UPDATE}()") == 1
    update = inspect.getsource(GPUModelRunner.update_pp_decode_requests)
    assert "self.postprocess_sampled(**outputs)" in update
    wanted = inspect.signature(GPUModelRunner.postprocess_sampled).parameters
    tokens = StepTokens(States({"a": 4}), torch.device("cpu"), is_last=False)
    tokens.take(step_of({"a": (4, [77])}))
    found = tokens.get_prev_sampled_outputs(None)
    assert found is not None and set(found) <= set(wanted)
    assert found["sampled_tokens"].dtype == torch.int64
    assert all(found[name].dtype == torch.int32 for name in found if name != "sampled_tokens")
    assert tokens.get_prev_sampled_outputs(None) is None


def test_a_task_that_decodes_brings_its_last_token() -> None:
    """A task in its prompt brings none: the runner has those, and would count them twice."""
    states = States({"decodes": 4, "reads": 40, "begins": 8})
    tokens = StepTokens(states, torch.device("cpu"), is_last=False)
    tokens.take(step_of({"decodes": (9, [77]), "reads": (16, [1, 2, 3]), "begins": (8, [5])}))
    rows = [states.req_id_to_index[name] for name in ("decodes", "begins")]
    assert taken(tokens) == {
        "sampled_tokens": [[77], [5]],
        "num_sampled": [1, 1],
        "num_rejected": [0, 0],
        "idx_mapping": rows,
    }
    tokens.take(step_of({"reads": (19, [4, 5])}))
    assert taken(tokens) is None


def test_the_last_stage_has_sampled_them_itself() -> None:
    tokens = StepTokens(States({"a": 4}), torch.device("cpu"), is_last=True)
    tokens.take(step_of({"a": (4, [77])}))
    assert taken(tokens) is None


def test_a_step_of_the_warm_up_brings_none() -> None:
    tokens = StepTokens(States({"a": 4}), torch.device("cpu"), is_last=False)
    step = step_of({"a": (4, [77])})
    step.scheduled_cached_reqs.new_token_ids = []
    tokens.take(step)
    assert taken(tokens) is None


def test_the_scheduler_lists_tokens_in_steps_of_pipelines() -> None:
    """From the first that is not computed on, unless it plans ahead of the tokens."""
    source = inspect.getsource(Scheduler._make_cached_request_data)
    assert "if self.use_pp and not self.scheduler_config.async_scheduling:" in source
    assert re.search(r"req\.num_computed_tokens :\s+req\.num_computed_tokens \+ num_tokens", source)


def test_graphs_read_and_write_the_same_activations_each_time() -> None:
    """A stage receives what a graph reads where it was captured, and knows what one overwrites."""
    execute = inspect.getsource(GPUModelRunner.execute_model)
    assert "v[:n].copy_(intermediate_tensors.tensors[k][:n])" in execute
    replay = inspect.getsource(cudagraph_utils.ModelCudaGraphManager.run_fullgraph)
    assert "return self.intermediate_tensors[: desc.num_tokens]" in replay
    capture = inspect.getsource(GPUModelRunner.capture_model)
    assert "self.intermediate_tensors,\n" in capture
    whole = IntermediateTensors({"hidden_states": torch.zeros(4, 2), "residual": torch.ones(4, 2)})
    part = whole[:2]
    assert all(part[name].data_ptr() == each.data_ptr() for name, each in whole.tensors.items())


def test_all_but_the_last_stage_end_a_step_without_sampling() -> None:
    source = inspect.getsource(GPUModelRunner.sample_tokens)
    first = source.index("if not self.is_last_pp_rank:")
    assert source.index("self.execute_model_state = None") < first
    assert source.index("self.postprocess_num_computed_tokens(input_batch)") > first

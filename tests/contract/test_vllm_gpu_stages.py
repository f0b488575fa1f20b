"""What model runner V2 does in a pipeline stage, and what the adapter of stages puts in its place.

The runner needs a GPU; its source, its scheduler and its records of requests do not.
"""

import copy
import inspect
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.pp_utils import PPHandler, compute_need_sampled_mask
from vllm.v1.worker.gpu.states import RequestState

from comm_pool.layout import Mode
from comm_pool.stages.links import LinkEnd
from kvadaptor.views import LAYOUT
from tests.harness.vllm.mode_schedulers import base_config
from worker.engine.config import ModeKey, mode_config
from worker.engine.runners.gpu_stage import AHEAD_STEPS_MAX, StepTokens
from worker.engine.runners.stage_link import PIECES

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


class Stage:
    """The tokens of a stage whose link brings these messages, and what it updated."""

    formation = 1

    def __init__(
        self, prefills: dict[str, int], *messages: list[int], has_link: bool = True
    ) -> None:
        self.states = States(prefills)
        self.messages = list(messages)
        self.updates: list[dict[str, list[Any]]] = []
        link = cast(LinkEnd, self) if has_link else None
        states, device = cast(RequestState, self.states), torch.device("cpu")
        self.tokens = StepTokens(states, device, self._update, link, is_last=False)
        self.tokens._message = self._message  # type: ignore[method-assign]

    def row(self, name: str) -> int:
        return self.states.req_id_to_index[name]

    def begin(self, cached: dict[str, tuple[int, list[int]]]) -> list[dict[str, list[Any]]]:
        """Begin a step of these tasks; return all updates before it."""
        self.updates.clear()
        self.tokens.take(step_of(cached))
        if (last := self.tokens.get_prev_sampled_outputs(None)) is not None:
            self._update(**last)
        return self.updates.copy()

    def samples(self, computed: dict[str, tuple[int, int]]) -> bool:
        """Note what a step samples of these tasks: tokens computed before it, and in it."""
        rows = [self.row(name) for name in computed]
        before, count = (np.array(each) for each in zip(*computed.values(), strict=True))
        batch = SimpleNamespace(
            idx_mapping_np=np.array(rows, dtype=np.int32),
            num_computed_tokens_np=before,
            num_scheduled_tokens=count,
            prefill_len_np=self.states.np[rows],
            max_seq_len_np=None,
        )
        return self.tokens.receive(cast(InputBatch, batch))

    def _message(self, rows: npt.NDArray[np.int32]) -> dict[str, torch.Tensor]:
        return self.tokens._update_of(torch.tensor(self.messages.pop(0))[:, None], rows)

    def _update(self, **given: torch.Tensor) -> None:
        self.updates.append({name: values.tolist() for name, values in given.items()})


def update(tokens: list[int], rows: list[int]) -> dict[str, list[Any]]:
    count = len(rows)
    return {
        "sampled_tokens": [[each] for each in tokens],
        "num_sampled": [1] * count,
        "num_rejected": [0] * count,
        "idx_mapping": rows,
    }


def step_of(cached: dict[str, tuple[int, list[int]]]) -> SchedulerOutput:
    """A step of tasks that the runner knows: what they have computed, and their next tokens."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData.make_empty()
    step.scheduled_cached_reqs.req_ids = list(cached)
    step.scheduled_cached_reqs.num_computed_tokens = [each[0] for each in cached.values()]
    step.scheduled_cached_reqs.new_token_ids = [each[1] for each in cached.values()]
    return step


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
    stage = Stage({"a": 4})
    stage.tokens.take(step_of({"a": (4, [77])}))
    found = stage.tokens.get_prev_sampled_outputs(None)
    assert found is not None and set(found) <= set(wanted)
    assert found["sampled_tokens"].dtype == torch.int64
    assert all(found[name].dtype == torch.int32 for name in found if name != "sampled_tokens")
    assert stage.tokens.get_prev_sampled_outputs(None) is None


def test_a_task_that_decodes_brings_its_last_token_if_the_host_has_it() -> None:
    """A task in its prompt brings none: the runner has those, and would count them twice."""
    stage = Stage({"decodes": 4, "reads": 40, "begins": 8})
    for computed in range(4, 9):
        stage.begin({"decodes": (computed, [70])})
    cached = {"decodes": (9, [77]), "reads": (16, [1, 2, 3]), "begins": (8, [5])}
    rows = [stage.row(name) for name in ("decodes", "begins")]
    assert stage.begin(cached) == [update([77, 5], rows)]
    assert stage.begin({"reads": (19, [4, 5])}) == []


def test_a_token_that_the_host_lacks_comes_from_the_last_stage() -> None:
    stage = Stage({"a": 4, "b": 9, "c": 6}, [70, 0, 60])
    stage.begin({})
    assert not stage.samples({"a": (0, 4), "b": (0, 8), "c": (0, 6)}), "b has more to read"
    a, c = stage.row("a"), stage.row("c")
    assert stage.begin({"a": (4, []), "b": (8, [])}) == [update([70, 0, 60], [a, -1, c])]
    assert stage.begin({"c": (6, [60])}) == [], "it has that one"


def test_a_token_is_taken_once_whichever_way_is_faster() -> None:
    stage = Stage({"a": 4, "b": 4}, [70, 71])
    stage.begin({})
    assert stage.samples({"a": (0, 4), "b": (0, 4)})
    assert stage.begin({"a": (4, [70])}) == [update([70], [stage.row("a")])]
    assert stage.begin({"b": (4, [])}) == [update([70, 71], [-1, stage.row("b")])]


def test_what_is_on_its_way_to_a_row_is_void_once_the_row_is_free() -> None:
    stage = Stage({"a": 4, "b": 4}, [70, 71])
    stage.begin({})
    stage.samples({"a": (0, 4), "b": (0, 4)})
    stage.tokens.on_req_idx_freed(stage.row("a"))  # Another task, as long as a, gets it.
    assert stage.begin({"b": (4, [])}) == [update([70, 71], [-1, stage.row("b")])]


def test_messages_that_nobody_waits_for_leave_the_link_at_last() -> None:
    stage = Stage({"a": 4}, *([70 + number] for number in range(3 * PIECES)))
    outstanding = []
    for number in range(3 * PIECES):
        stage.begin({})
        stage.samples({"a": (number, 4)})
        outstanding.append(number + 1 - (3 * PIECES - len(stage.messages)))
    assert max(outstanding) <= AHEAD_STEPS_MAX < PIECES


def test_what_is_on_its_way_to_a_row_is_void_if_the_step_ends_its_task() -> None:
    """The runner may give the row away in this very step, before the device has the message."""
    stage = Stage({"a": 4, "b": 4, "c": 4}, [70, 71, 72])
    stage.begin({})
    stage.samples({"a": (0, 4), "b": (0, 4), "c": (0, 4)})
    step = step_of({"b": (4, [])})
    step.finished_req_ids, step.preempted_req_ids = {"a", "unknown"}, {"c"}
    stage.tokens.take(step)
    found = stage.tokens.get_prev_sampled_outputs(None)
    assert found is not None
    assert found["idx_mapping"].tolist() == [-1, stage.row("b"), -1]


def test_rooms_of_the_runner_suffice_for_all_steps_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM writes inputs of steps into rooms by turns; the device may still read earlier ones."""
    source = inspect.getsource(GPUModelRunner.__init__)
    assert "max_concurrent_batches" in source
    config = mode_config(base_config(), ModeKey(Mode.PP, 2, stages=2), LAYOUT.name)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    for is_ahead, steps in ((True, 3), (False, 2)):
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = is_ahead
        assert config.max_concurrent_batches == steps, "stages, and one more if it plans ahead"


def test_a_group_that_is_formed_again_waits_for_nothing_of_before() -> None:
    stage = Stage({"a": 4})
    stage.begin({})
    stage.samples({"a": (0, 4)})
    stage.formation += 1
    assert stage.begin({"a": (4, [70])}) == [update([70], [stage.row("a")])]


def test_a_stage_between_first_and_last_counts_tokens() -> None:
    """It reads none, and no message reaches it."""
    stage = Stage({"a": 4, "b": 4}, has_link=False)
    stage.begin({})
    assert stage.samples({"a": (0, 4), "b": (0, 4)})
    rows = [stage.row(name) for name in ("b", "a")]
    assert stage.begin({"a": (4, []), "b": (4, [7])}) == [update([7, 0], rows)]


def test_the_last_stage_has_sampled_them_itself() -> None:
    states = cast(RequestState, States({"a": 4}))
    tokens = StepTokens(states, torch.device("cpu"), lambda **_: None, None, is_last=True)
    tokens.take(step_of({"a": (4, [77])}))
    assert tokens.get_prev_sampled_outputs(None) is None


def test_steps_of_the_warm_up_pass_no_tokens_on() -> None:
    """They are not led: no `take` goes before them."""
    stage = Stage({"a": 4})
    assert stage.samples({"a": (0, 4)})
    assert not stage.tokens._sampled
    states = cast(RequestState, States({"a": 4}))
    link = cast(LinkEnd, SimpleNamespace(formation=0, send=lambda _: pytest.fail("it sends")))
    last = StepTokens(states, torch.device("cpu"), lambda **_: None, link, is_last=True)
    sampled = torch.zeros(1, 1)
    last.broadcast(sampled, sampled, sampled, cast(InputBatch, None))


def test_a_step_of_the_warm_up_brings_none() -> None:
    stage = Stage({"a": 4}, has_link=False)
    step = step_of({"a": (3, [77])})
    step.scheduled_cached_reqs.new_token_ids = []
    stage.tokens.take(step)
    assert stage.tokens.get_prev_sampled_outputs(None) is None


def test_both_ends_find_the_same_steps_to_sample_what_is_needed() -> None:
    """vLLM's own rule, of fields that all stages have alike."""
    source = inspect.getsource(compute_need_sampled_mask).split('"""')[2]
    read = set(re.findall(r"input_batch\.(\w+)", source))
    assert read == {
        "num_computed_tokens_np", "prefill_len_np", "num_scheduled_tokens", "max_seq_len_np",
        "is_prefilling_np",
    }  # fmt: skip


def test_the_scheduler_lists_no_tokens_of_steps_ahead() -> None:
    """`schedule_share` does, of what the host has."""
    source = inspect.getsource(Scheduler._make_cached_request_data)
    assert "if self.use_pp and not self.scheduler_config.async_scheduling:" in source
    ahead = inspect.getsource(AsyncScheduler._update_after_schedule)
    assert "request.next_decode_eligible_step = (" in ahead, "`schedule_share` sets it anew"


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

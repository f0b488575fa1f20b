"""vLLM adapter: one model runner per mode, over a ready module tree and a view of the KV buffer.

This adapts model runner V1, which vLLM uses on CPU. It differs from vLLM's in four ways. It adopts
the KV cache instead of allocating one. One of several trees computes a step. A task that continues
from elsewhere enters with its tokens. Random draws depend on (seed, position) alone, so they are
the same in every mode, on every rank of a group and after a hand-over.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingType
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.utils import bind_kv_cache

from comm_pool.layout import StepMode
from comm_pool.stages.links import StageLinks
from kvadaptor.views import KVBuffer
from worker.engine.calibrate import CPU_TOKENS_MAX
from worker.engine.scheduling.new_tasks import TokenIds, Tokens
from worker.engine.scheduling.step_plan import give_lists, listed
from worker.engine.sequence_parallel.exchange import Exchange
from worker.engine.sequence_parallel.tree import exchange_of

_SEED_MASK = (1 << 63) - 1
_MIX = 0x9E3779B97F4A7C15
"""Weyl constant of splitmix64; spreads consecutive positions over the seed space."""


def position_seed(seed: int, position: int) -> int:
    """Return the seed of the draw for output token `position`, from 0 (splitmix64 finaliser)."""
    z = (seed + (position + 1) * _MIX) & ((1 << 64) - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (z ^ (z >> 31)) & _SEED_MASK


class PositionGenerator(torch.Generator):
    """A request's generator; it is seeded before each draw, so it has no offset to rewind.

    vLLM 0.32 rewinds generators after a partial prefill, for which CPU generators raise an error.
    """

    def get_offset(self) -> int:
        """See the class."""
        return 0

    def set_offset(self, offset: int) -> None:
        """See the class."""


class ModeRunner(CPUModelRunner):
    """vLLM's CPU runner for the groups of one width."""

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        trees: Mapping[StepMode, nn.Module],
        links: StageLinks | None = None,
    ) -> None:
        """All `trees` compute the same step; vLLM's own set-up sees the first.

        `links` are those of a pipeline stage.
        """
        super().__init__(config, device)
        self._before = links.before if links is not None else None
        self._after = links.after if links is not None else None
        self._trees = dict(trees)
        self.model = next(iter(self._trees.values()))
        self._kv_views: dict[str, torch.Tensor] = {}
        self._resuming: Mapping[str, list[int]] = {}
        self._forgotten: frozenset[str] = frozenset()

    def adopt_kv(self, config: KVCacheConfig, kv: KVBuffer, width: int) -> None:
        """Use the rank's buffer as the KV cache of this width."""
        del width  # The configuration says it.
        self._kv_views = kv.views(config)
        self.initialize_kv_cache(config)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Bind the adopted views instead of allocating."""
        bind_kv_cache(
            self._kv_views, self.compilation_config.static_forward_context, self.kv_caches
        )
        return self._kv_views

    @property
    def modes(self) -> tuple[StepMode, ...]:
        """The modes that can compute a step; the first is vLLM's own."""
        return tuple(self._trees)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of its sp steps, if it has any."""
        return exchange_of(self._trees)

    @property
    def sent_bytes(self) -> int:
        """Memory of activations is not counted on CPU."""
        return 0

    @property
    def graphed_tokens(self) -> int:
        """Steps of at most this many tokens replay a graph of the first tree: none does on CPU."""
        return 0

    def prompt_graph_sizes(self, mode: StepMode) -> Sequence[int]:
        """Return the sizes in tokens of the graphs for steps that read prompts: none on CPU."""
        return ()

    def use(self, mode: StepMode, *, reads_prompts: bool = False) -> None:
        """Compute in this mode from now on; modes of a width share everything but the tree."""
        del reads_prompts  # There are no graphs on CPU.
        self.model = self._trees[mode]

    def run(
        self,
        step: SchedulerOutput,
        grammar: GrammarOutput | None,
        resuming: Mapping[str, TokenIds],
        known: Mapping[str, Tokens],
    ) -> ModelRunnerOutput:
        """Execute one step; `resuming` gives the tokens that new tasks of it already have."""
        del known  # Arrays of the same tasks' tokens.
        give_lists(step)
        self._resuming = {name: listed(ids) for name, ids in resuming.items()}
        output = self.execute_model(step, self._receive(step.total_num_scheduled_tokens))
        if isinstance(output, IntermediateTensors):
            assert self._after is not None
            self._after.send([output[name] for name in sorted(output.tensors)])
            return EMPTY_MODEL_RUNNER_OUTPUT
        if output is None:
            output = self.sample_tokens(grammar)
        assert isinstance(output, ModelRunnerOutput)
        return output

    def _receive(self, tokens: int) -> IntermediateTensors | None:
        """Return the activations of a step from the stage before, if there is one."""
        if self._before is None or not tokens:
            return None
        received: IntermediateTensors = self.model.make_empty_intermediate_tensors(
            tokens, self.dtype, self.device
        )
        self._before.receive([received[name] for name in sorted(received.tensors)])
        return received

    def forget_tasks(self) -> None:
        """Make the next step forget all tasks: some were left in mid-step."""
        self._forgotten = frozenset(self.requests)

    def expected_graph_bytes(self) -> tuple[int, int]:
        """There are no graphs on CPU."""
        return 0, 0

    is_launch_bound = False
    """No step on CPU is bound by launches."""

    def prepare_graphs(self, launch_bound: bool | None = None) -> int:
        """There are no graphs on CPU."""
        return 0

    def warm(self) -> None:
        """Compute once in each mode; all ranks of the group must call it together.

        A step of the largest size would take seconds, and on CPU it has no lasting effect.
        """
        for mode in self._trees:
            self.use(mode)
            self._dummy_run(min(self.max_num_tokens, CPU_TOKENS_MAX))

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        if self._forgotten:
            finished = scheduler_output.finished_req_ids | self._forgotten
            scheduler_output = dataclasses.replace(scheduler_output, finished_req_ids=finished)
            self._forgotten = frozenset()
        new = scheduler_output.scheduled_new_reqs
        step = self._continue_tasks(scheduler_output) if self._resuming else scheduler_output
        correction = super()._update_states(step)
        for request in new:
            self._use_position_generator(request.req_id)
        return correction

    def _use_position_generator(self, req_id: str) -> None:
        state = self.requests[req_id]
        params = state.sampling_params
        if params is None or params.sampling_type != SamplingType.RANDOM_SEED:
            return
        state.generator = PositionGenerator(device=self.device)
        index = self.input_batch.req_id_to_index.get(req_id)
        if index is not None:
            self.input_batch.generators[index] = state.generator

    def _continue_tasks(self, step: SchedulerOutput) -> SchedulerOutput:
        """Turn new requests that already have tokens into vLLM's "resumed from preemption" ones."""
        cached = step.scheduled_cached_reqs
        resumed = [r for r in step.scheduled_new_reqs if r.req_id in self._resuming]
        # A task may return to a mode that it left, before that mode's next step. Its old state must
        # go first, or vLLM would remove the new one with it.
        again = step.finished_req_ids & {r.req_id for r in resumed}
        for req_id in again:
            self.requests.pop(req_id, None)
            self.num_prompt_logprobs.pop(req_id, None)
            self.input_batch.remove_request(req_id)
        for request in resumed:
            self.requests[request.req_id] = _state_of(request, self._resuming[request.req_id])
        return dataclasses.replace(
            step,
            finished_req_ids=step.finished_req_ids - again,
            scheduled_new_reqs=[
                r for r in step.scheduled_new_reqs if r.req_id not in self._resuming
            ],
            scheduled_cached_reqs=dataclasses.replace(
                cached,
                req_ids=cached.req_ids + [r.req_id for r in resumed],
                resumed_req_ids=cached.resumed_req_ids | {r.req_id for r in resumed},
                new_block_ids=cached.new_block_ids + [r.block_ids for r in resumed],
                num_computed_tokens=cached.num_computed_tokens
                + [r.num_computed_tokens for r in resumed],
                num_output_tokens=cached.num_output_tokens
                + [len(self._resuming[r.req_id]) for r in resumed],
                # All but the last pipeline stage read these: the tokens that no step has sampled.
                new_token_ids=cached.new_token_ids + [[] for _ in resumed],
            ),
        )

    def _get_prompt_logprobs_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Compute token ranks without torch.compile, which takes seconds at the first prompt."""
        with torch.compiler.set_stance("force_eager"):
            return super()._get_prompt_logprobs_dict(*args, **kwargs)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        batch = self.input_batch
        for index, generator in batch.generators.items():
            state = self.requests[batch.req_ids[index]]
            position = len(state.output_token_ids)
            generator.manual_seed(position_seed(state.sampling_params.seed, position))
        # As above: torch.compile would take seconds at the first request with logprobs.
        with torch.compiler.set_stance("force_eager"):
            return super()._sample(logits, spec_decode_metadata)


def _state_of(request: NewRequestData, generated: list[int]) -> CachedRequestState:
    return CachedRequestState(
        req_id=request.req_id,
        prompt_token_ids=request.prompt_token_ids,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        pooling_params=request.pooling_params,
        generator=None,
        block_ids=request.block_ids,
        num_computed_tokens=request.num_computed_tokens,
        output_token_ids=list(generated),
        lora_request=request.lora_request,
    )

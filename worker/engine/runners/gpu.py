"""vLLM adapter: the runner of one mode on CUDA, over vLLM's unchanged model runner V2.

V2 takes a ready module, continues a task from all its tokens, and draws by (seed, position). So
only two things are adapted: vLLM's allocation of KV gets the rank's buffer, and one of several
trees computes a step, each with its own graphs.
"""

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.eplb_utils import preserve_serving_state
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.warmup import warmup_kernels

from comm_pool.layout import StepMode
from comm_pool.mixed import Mixed
from comm_pool.stages.links import StageLinks
from kvadaptor.views import KVBuffer
from worker.engine.config import sparse
from worker.engine.runners.captures import keep_frozen
from worker.engine.runners.gpu_stage import StageTraffic, StepTokens
from worker.engine.runners.workspace import lock_workspace, open_workspace
from worker.engine.scheduling.new_tasks import TokenIds, Tokens
from worker.engine.scheduling.step_plan import give_arrays, give_lists
from worker.engine.scheduling.token_rows import take_arrays
from worker.engine.sequence_parallel.exchange import Exchange
from worker.engine.sequence_parallel.tree import capturing, exchange_of
from worker.engine.weights.deep_gemm import warm_deep_gemm

log = structlog.get_logger()
keep_frozen()


class _AdoptedBuffer(TorchFunctionMode):
    """Answers vLLM's one allocation of the KV cache with an existing buffer."""

    def __init__(self, raw: torch.Tensor) -> None:
        super().__init__()
        self.raw = raw
        self.adopted = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        wanted = (self.raw.numel(),)
        if func is torch.zeros and args == wanted and given.get("dtype") is torch.int8:
            self.adopted += 1
            return self.raw
        return func(*args, **given)


class _NoDrafts:
    """Stands for draft tokens that vLLM clears where it drafts none."""

    def __getitem__(self, _index: int) -> "_NoDrafts":
        return self

    def zero_(self) -> None:
        """Do nothing."""


_NO_DRAFTS = _NoDrafts()


class DeviceTimes:
    """When a step began and ended by the device's clock: events on the stream that computes it."""

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        """The step begins when the device comes to this point."""
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        """The step ends when the device comes to this point."""
        self._ended.record()

    def seconds(self, before: "DeviceTimes | None") -> float:
        """Return how long the step took, from the end of `before` if that is given.

        Call it when the step's tokens are there: the device passes its end at about that moment.
        """
        self._ended.synchronize()
        first = before._ended if before is not None else self._began
        return float(first.elapsed_time(self._ended)) * 1e-3


SENT_STEPS = 2
"""Long steps whose activations a stage has room for besides those that it computes."""

SP_GRAPH_TOKENS_MIN = 64
"""Smallest decode batch that sp has a graph for: below it tp reads less weights per step."""


PROMPT_GRAPH_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024)
"""Sizes of graphs for steps that read prompts; launches bound steps of at most these tokens."""

MORE_PROMPT_GRAPH_TOKENS = (1280, 1536, 2048)
"""The sizes after these, where launches bound such steps too: small models in wide groups."""

BOUND_TOKENS = (1088, 2048)
"""Sizes of the two steps that tell whether launches bound a mode's steps of more tokens."""

BOUND_RATIO = 1.5
"""Launches bound them if the large one takes less than this multiple of the small one.

Bound by computation it would take 1.9 times as long.
"""

BOUND_REPEATS = 2
"""Measurements of each; the shortest counts."""

PROMPT_SPLITS_MAX = 4
"""Parts into which these graphs split attention over one context.

Their working memory grows with parts times tokens; with vLLM's 32 it would be four times that of
the largest decode graph.
"""


PROMPT_GRAPH_TOKENS_BORROWING = (256, 512, 768, 1024)
"""The same where steps borrow: the loans of a smaller one take as long."""


def prompt_graph_sizes(
    batched_tokens_max: int, *, borrows: bool, is_launch_bound: bool = False
) -> list[int]:
    """Return the captured sizes of steps that read prompts."""
    sizes = [*(PROMPT_GRAPH_TOKENS_BORROWING if borrows else PROMPT_GRAPH_TOKENS)]
    if is_launch_bound:
        sizes += MORE_PROMPT_GRAPH_TOKENS
    return [size for size in sizes if size <= batched_tokens_max]


def is_launch_bound(short_s: float, long_s: float) -> bool:
    """Return whether launches bound the steps of `BOUND_TOKENS`, which take these seconds."""
    return long_s < BOUND_RATIO * short_s


def sp_graph_sizes(sizes: list[int], shares: int) -> list[int]:
    """Return those of tp's graph sizes that sp divides without padding."""
    return [size for size in sizes if size >= SP_GRAPH_TOKENS_MIN and size % shares == 0]


def _share_memory(some: IntermediateTensors, others: IntermediateTensors) -> bool:
    """Return whether tensors of the same names begin at the same places."""
    return all(each.data_ptr() == others[name].data_ptr() for name, each in some.tensors.items())


def _shares(mode: StepMode, width: int) -> int:
    """Return into how many token shares a mode of sp's kind divides a step."""
    return mode.sp if isinstance(mode, Mixed) else width


class GpuModeRunner(GPUModelRunner):
    """vLLM's runner V2 over ready module trees and the rank's KV buffer."""

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        trees: Mapping[StepMode, nn.Module],
        borrowing: Collection[StepMode] = (),
        links: StageLinks | None = None,
    ) -> None:
        """All `trees` compute the same step; vLLM's own set-up sees the first.

        Those of the modes `borrowing` read weights from peers. `links` are those of a pipeline
        stage.
        """
        super().__init__(config, device)
        self._borrowing = frozenset(borrowing)
        self._trees = dict(trees)
        self._first = next(iter(self._trees))
        self._graphs: dict[StepMode, ModelCudaGraphManager] = {}
        self._prompt_graphs: ModelCudaGraphManager | None = None
        """Prompt graphs of the first tree.

        Their attention is general, so decodes keep graphs of their own.
        """
        self._split_builders: list[Any] = []
        """The attention metadata builders of the prompt graphs."""
        self._decode_limits = (0, 0)
        self.is_launch_bound = self._may_be_launch_bound
        """Whether launches bound steps that are longer than the usual prompt graphs."""
        self._takes_arrays = take_arrays(self.req_states.all_token_ids)
        self._launched = torch.cuda.Event()
        """Recorded after all that was launched here."""
        self.load_model(model=self._trees[self._first])
        self._traffic: StageTraffic | None = None
        if links is not None:
            self.pp_handler = StepTokens(
                self.req_states,
                device,
                self.postprocess_sampled,
                links.tokens,
                is_last=self.is_last_pp_rank,
            )
            self._traffic = StageTraffic(links, self.intermediate_tensors)

    def adopt_kv(self, config: KVCacheConfig, kv: KVBuffer, width: int) -> None:
        """Use the rank's buffer as the KV cache of this width."""
        adopted = _AdoptedBuffer(kv.raw)
        self.initialize_kv_cache(config, kv_cache_allocation_context=adopted)
        assert adopted.adopted == 1, f"vLLM did not adopt the KV buffer in width {width}."
        self._graphs = {mode: self._graph_manager(mode, width) for mode in self._trees}
        self._prepare_prompt_graphs()

    def _graph_manager(self, mode: StepMode, width: int) -> ModelCudaGraphManager:
        """Return vLLM's own manager for the first tree; graphs replay without reading `model`."""
        own = self.cudagraph_manager
        assert own is not None
        if mode == self._first:
            return own
        return self._own_manager(self._sp_sizes(mode, width), own.cudagraph_mode)

    def _sp_sizes(self, mode: StepMode, width: int) -> list[int]:
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        sizes = sparse(sizes) if mode in self._borrowing else sizes
        return sp_graph_sizes(sizes, _shares(mode, width))

    def _prompt_sizes(self) -> list[int]:
        return prompt_graph_sizes(
            self.scheduler_config.max_num_batched_tokens,
            borrows=self._first in self._borrowing,
            is_launch_bound=self.is_launch_bound,
        )

    @property
    def _may_be_launch_bound(self) -> bool:
        """Whether that is worth a measurement. Loans bound steps that borrow."""
        return self._first not in self._borrowing and self.max_num_tokens >= max(BOUND_TOKENS)

    def _find_launch_bound(self) -> bool:
        """Return whether launches bound steps of more than the usual prompt graphs' tokens.

        All ranks of the group must call it together, and all find the same.
        """
        self.use(self._first)
        times = torch.zeros(len(BOUND_TOKENS), dtype=torch.float64)
        for row, tokens in enumerate(BOUND_TOKENS):
            # The first one compiles and allocates.
            times[row] = min([self._eager_step_s(tokens) for _ in range(1 + BOUND_REPEATS)][1:])
        if self.parallel_config.tensor_parallel_size > 1:
            dist.all_reduce(times, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
        short_s, long_s = times.tolist()
        found = is_launch_bound(short_s, long_s)
        log.info("prompt_graphs", short_s=short_s, long_s=long_s, is_launch_bound=found)
        return found

    def _eager_step_s(self, tokens: int) -> float:
        """Return the seconds of a step that replays no graph."""
        torch.accelerator.synchronize()
        started = time.perf_counter()
        self._dummy_run(tokens)
        torch.accelerator.synchronize()
        return time.perf_counter() - started

    def _prepare_prompt_graphs(self) -> None:
        """Prepare graphs for prompts if the back end can replay any mix of queries.

        FlashAttention 3 can; the others read prompts eagerly.
        """
        groups = [group for kind in self.attn_groups for group in kind]
        builders = [builder for group in groups for builder in group.metadata_builders]
        if not all(getattr(builder, "max_num_splits", 0) for builder in builders):
            return
        self._prompt_graphs = self._own_manager(self._prompt_sizes(), CUDAGraphMode.FULL)
        self._split_builders = builders
        first = builders[0]
        self._decode_limits = (first.max_cudagraph_size or 0, first.max_num_splits)

    def _own_manager(self, sizes: list[int], kind: CUDAGraphMode) -> ModelCudaGraphManager:
        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.cudagraph_capture_sizes = sizes
        config.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
        return ModelCudaGraphManager(
            config, self.device, kind, decode_query_len=self.decode_query_len
        )

    @property
    def modes(self) -> tuple[StepMode, ...]:
        """The modes that can compute a step; the first is vLLM's own."""
        return tuple(self._trees)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of its sp steps, if it has any."""
        return exchange_of(self._trees)

    @property
    def graphed_tokens(self) -> int:
        """Steps of at most this many tokens replay a graph of the first tree; 0 if none does."""
        return self._prompt_sizes()[-1] if self._prompt_graphs is not None else 0

    def prompt_graph_sizes(self, mode: StepMode) -> Sequence[int]:
        """Return the sizes in tokens of the graphs for steps that read prompts in this mode."""
        if self._prompt_graphs is None or mode != self._first:
            return ()
        return self._prompt_sizes()

    @property
    def sent_bytes(self) -> int:
        """Bytes of activations that wait at most to be sent to the next pipeline stage."""
        if self._traffic is None or self.is_last_pp_rank:
            return 0
        row = self.model.make_empty_intermediate_tensors(1, self.model_config.dtype, self.device)
        return SENT_STEPS * self.max_num_tokens * sum(each.nbytes for each in row.tensors.values())

    def use(self, mode: StepMode, *, reads_prompts: bool = False) -> None:
        """Compute in this mode from now on; modes of a width share all but tree and graphs."""
        self.model = self._trees[mode]
        if self._graphs:
            reads_prompts &= mode == self._first and self._prompt_graphs is not None
            self.cudagraph_manager = self._prompt_graphs if reads_prompts else self._graphs[mode]
            prompt_limits = (self.graphed_tokens, PROMPT_SPLITS_MAX)
            for builder in self._split_builders:
                limits = prompt_limits if reads_prompts else self._decode_limits
                builder.max_cudagraph_size, builder.max_num_splits = limits

    def run(
        self,
        step: SchedulerOutput,
        grammar: GrammarOutput | None,
        resuming: Mapping[str, TokenIds],
        known: Mapping[str, Tokens],
    ) -> Any:
        """Launch one step; the result may still be in flight (`get_output` waits for it).

        `known` are tokens of new tasks that already exist as arrays.
        """
        if self._takes_arrays and self._launched.query():
            give_arrays(step, known)
        else:
            give_lists(step)
        tokens = step.total_num_scheduled_tokens
        received = self._begin_stage(step, tokens)
        times = DeviceTimes()
        # A dummy step of a stage that does not sample leaves its own.
        self.execute_model_state = None
        output = self.execute_model(step, received)
        result = self.sample_tokens(grammar) if self.execute_model_state is not None else output
        if self._traffic is not None and tokens:
            self._end_stage(self._traffic, output, tokens)
        self._launched.record()
        times.end()
        if hasattr(result, "get_output"):
            result.device_times = times
        return result

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add new tasks; vLLM clears draft tokens of each, also if no tensor has any.

        That is two of torch's calls, and more than all else that it notes of a task.
        """
        states = self.req_states
        drafts = states.draft_tokens
        if not drafts.numel():
            states.draft_tokens = _NO_DRAFTS
        try:
            super().add_requests(scheduler_output)
        finally:
            states.draft_tokens = drafts

    def _begin_stage(self, step: SchedulerOutput, tokens: int) -> IntermediateTensors | None:
        """Let a step of a pipeline stage wait for its activations; return their buffers."""
        if self._traffic is None:
            return None
        self.pp_handler.take(step)
        is_graphed = tokens <= self._graph_tokens_max
        received = self._traffic.begin(tokens, is_graphed=is_graphed)
        if received is not None:
            # vLLM copies what it is given to these, which is no copy then.
            self.intermediate_tensors = received
        return received

    def _end_stage(self, traffic: StageTraffic, output: Any, tokens: int) -> None:
        sent = output if isinstance(output, IntermediateTensors) else None
        reused = getattr(self.cudagraph_manager, "intermediate_tensors", None)
        is_reused = sent is not None and reused is not None and _share_memory(sent, reused)
        traffic.end(sent, tokens, is_reused=is_reused)

    @property
    def _graph_tokens_max(self) -> int:
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        return max(self.graphed_tokens, max(sizes, default=0))

    def forget_tasks(self) -> None:
        """Forget all tasks: some were left in mid-step, perhaps before sampling."""
        for req_id in list(self.req_states.req_id_to_index):
            self._remove_request(req_id)
        self.execute_model_state = None

    def expected_graph_bytes(self) -> tuple[int, int]:
        """Return the expected bytes of this mode's graphs: (working memory, the rest).

        vLLM captures the largest few and discards them. All graphs of all modes share one pool, so
        they share the working memory of the largest one. All ranks of the mode's group must call it
        together, with the group active.
        """
        self._first_graph_bytes = 0
        expected = int(self.profile_cudagraph_memory())
        working = min(expected, self._first_graph_bytes)
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        width = self.parallel_config.tensor_parallel_size
        others = [mode for mode in self._trees if mode is not self._first]
        more = sum(len(self._sp_sizes(mode, width)) for mode in others)
        more += len(self._prompt_sizes())
        return working, int((expected - working) * (1 + more / max(1, len(sizes))))

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture; in a trial, record the size of the first graph.

        The workspace stays open until `warm` has computed in every mode.
        """
        open_workspace()
        taken = int(super().capture_model(profile_only=profile_only))
        open_workspace()
        samples = getattr(self.cudagraph_manager, "_capture_mem_samples", None)
        if profile_only and samples:
            self._first_graph_bytes = max(0, int(samples[0]))
        return taken

    def prepare_graphs(self, launch_bound: bool | None = None) -> int:
        """Capture the CUDA graphs of all trees with their group active; return their bytes.

        `launch_bound` is what a process before this one has found, if any.
        """
        taken = 0
        for mode in self._trees:
            self.use(mode)
            if self.needs_cudagraph_capture():
                with capturing(self._trees[mode]):
                    taken += int(self.capture_model())
        if self._prompt_graphs is not None:
            if self._may_be_launch_bound:
                if launch_bound is None:
                    launch_bound = self._find_launch_bound()
                self.is_launch_bound = launch_bound
                self._prompt_graphs = self._own_manager(self._prompt_sizes(), CUDAGraphMode.FULL)
            self.use(self._first, reads_prompts=True)
            taken += int(self.capture_model())
        self.use(self._first)
        return taken

    def warm(self) -> None:
        """Compute once in each mode, with prefills, decodes and all sampling features.

        vLLM compiles the small kernels that prepare a step at first use, 2.5 s in all, which no
        task should wait for. All ranks of the group must call it together.
        """
        for mode in self._trees:
            self.use(mode)
            warm_deep_gemm(self._trees[mode], self.max_num_tokens)
            # Large enough for NCCL; custom all-reduce takes the small messages.
            self._dummy_run(self.max_num_tokens)
        self.use(self._first)
        # All but the first pipeline stage take activations.
        execute = partial(self.execute_model, intermediate_tensors=self.intermediate_tensors)
        with preserve_serving_state(self):  # A rank may inherit blocks.
            warmup_kernels(self, execute, self.sample_tokens)
        if isinstance(self.pp_handler, StepTokens):
            self.pp_handler.warm()
        lock_workspace()
        # Sampling for the maximum number of tasks took a gigabyte that is not needed soon.
        torch.accelerator.empty_cache()

"""vLLM adapter: the runner of one mode on CUDA, vLLM's model runner V2 as it is.

V2 takes a ready module, continues a task from all its tokens, and draws by (seed, position); so
only two things need a seam: vLLM's own allocation of KV is answered with the rank's buffer, and a
step may be computed by one of several trees, each with graphs of its own.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.warmup import warmup_kernels

from comm_pool.layout import StepMode
from comm_pool.mixed import Mixed
from kvadaptor.views import KVBuffer
from worker.engine.scheduling.step_plan import TokenIds, Tokens, give_arrays, give_lists
from worker.engine.scheduling.token_rows import take_arrays
from worker.engine.sequence_parallel.exchange import Exchange
from worker.engine.sequence_parallel.tree import capturing, exchange_of


class _AdoptedBuffer(TorchFunctionMode):
    """Answers vLLM's one allocation of the KV cache with a buffer that exists."""

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


SP_GRAPH_TOKENS_MIN = 64
"""Smallest decode batch that sp gets a graph for: below it tp reads less weights per step."""


PROMPT_GRAPH_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024)
"""Steps that read prompts of up to so many tokens are bound by their launches: they have graphs."""

PROMPT_SPLITS_MAX = 4
"""Parts that attention over one context is split into in these graphs. Their working memory grows
with parts times tokens; with vLLM's 32 it would be four times that of the largest decode graph."""


def prompt_graph_sizes(batched_tokens_max: int) -> list[int]:
    """The sizes of steps that read prompts and are captured."""
    return [size for size in PROMPT_GRAPH_TOKENS if size <= batched_tokens_max]


def sp_graph_sizes(sizes: list[int], shares: int) -> list[int]:
    """The batch sizes, of those that tp has graphs for, that sp shares out without padding."""
    return [size for size in sizes if size >= SP_GRAPH_TOKENS_MIN and size % shares == 0]


def _shares(mode: StepMode, width: int) -> int:
    """Into how many shares of tokens a mode of sp's kind divides a step."""
    return mode.sp if isinstance(mode, Mixed) else width


class GpuModeRunner(GPUModelRunner):
    """vLLM's runner V2 over ready module trees and the rank's KV buffer."""

    def __init__(
        self, config: VllmConfig, device: torch.device, trees: Mapping[StepMode, nn.Module]
    ) -> None:
        """`trees` compute a step alike; the first is the one that vLLM's own set-up sees."""
        super().__init__(config, device)
        self._trees = dict(trees)
        self._first = next(iter(self._trees))
        self._graphs: dict[StepMode, ModelCudaGraphManager] = {}
        self._prompt_graphs: ModelCudaGraphManager | None = None
        """Of the first tree. Attention in them is general, so decodes keep graphs of their own."""
        self._split_builders: list[Any] = []
        """Who plans attention in them."""
        self._decode_limits = (0, 0)
        self._takes_arrays = take_arrays(self.req_states.all_token_ids)
        self._launched = torch.cuda.Event()
        """Behind all that was launched here."""
        self.load_model(model=self._trees[self._first])

    def adopt_kv(self, config: KVCacheConfig, kv: KVBuffer, width: int) -> None:
        """Use the rank's buffer as the KV cache of this width."""
        adopted = _AdoptedBuffer(kv.raw)
        self.initialize_kv_cache(config, kv_cache_allocation_context=adopted)
        assert adopted.adopted == 1, f"vLLM did not adopt the KV buffer in width {width}."
        self._graphs = {mode: self._graph_manager(mode, width) for mode in self._trees}
        self._prepare_prompt_graphs()

    def _graph_manager(self, mode: StepMode, width: int) -> ModelCudaGraphManager:
        """vLLM's own for the first tree; graphs replay without looking at `model`."""
        own = self.cudagraph_manager
        assert own is not None
        if mode is self._first:
            return own
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        return self._own_manager(sp_graph_sizes(sizes, _shares(mode, width)), own.cudagraph_mode)

    def _prepare_prompt_graphs(self) -> None:
        """FlashAttention 3 can replay any mix of queries; other back ends read prompts eagerly."""
        groups = [group for kind in self.attn_groups for group in kind]
        builders = [builder for group in groups for builder in group.metadata_builders]
        if not all(getattr(builder, "max_num_splits", 0) for builder in builders):
            return
        sizes = prompt_graph_sizes(self.scheduler_config.max_num_batched_tokens)
        self._prompt_graphs = self._own_manager(sizes, CUDAGraphMode.FULL)
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
        """How a step can be computed; the first is vLLM's own way."""
        return tuple(self._trees)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of its sp steps, if it has any."""
        return exchange_of(self._trees)

    @property
    def graphed_tokens(self) -> int:
        """Up to so many tokens every step of the first tree replays a graph; 0 where none does."""
        return PROMPT_GRAPH_TOKENS[-1] if self._prompt_graphs is not None else 0

    def use(self, mode: StepMode, *, reads_prompts: bool = False) -> None:
        """Compute in this mode from now on; modes of a width share all but tree and graphs."""
        self.model = self._trees[mode]
        if self._graphs:
            reads_prompts &= mode is self._first and self._prompt_graphs is not None
            self.cudagraph_manager = self._prompt_graphs if reads_prompts else self._graphs[mode]
            prompt_limits = (PROMPT_GRAPH_TOKENS[-1], PROMPT_SPLITS_MAX)
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
        """Launch one step; the result may still be under way (`get_output` waits for it).

        `known` are the tokens of new tasks that are there as arrays already.
        """
        if self._takes_arrays and self._launched.query():
            give_arrays(step, known)
        else:
            give_lists(step)
        output = self.execute_model(step)
        result = self.sample_tokens(grammar) if output is None else output
        self._launched.record()
        return result

    def forget_tasks(self) -> None:
        """Let no task be known any more: some were left in mid-step, perhaps before sampling."""
        for req_id in list(self.req_states.req_id_to_index):
            self._remove_request(req_id)
        self.execute_model_state = None

    def expected_graph_bytes(self) -> tuple[int, int]:
        """What this mode's graphs will take: (working memory, the rest).

        vLLM captures the largest few, and forgets them. All graphs of all modes share one pool, so
        the working memory of the largest one serves them all. All ranks of the mode's group must
        call it together, with the group active.
        """
        self._first_graph_bytes = 0
        expected = int(self.profile_cudagraph_memory())
        working = min(expected, self._first_graph_bytes)
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        width = self.parallel_config.tensor_parallel_size
        others = [mode for mode in self._trees if mode is not self._first]
        more = sum(len(sp_graph_sizes(sizes, _shares(mode, width))) for mode in others)
        more += len(prompt_graph_sizes(self.scheduler_config.max_num_batched_tokens))
        return working, int((expected - working) * (1 + more / max(1, len(sizes))))

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture; of a trial, remember what the first graph took."""
        taken = int(super().capture_model(profile_only=profile_only))
        samples = getattr(self.cudagraph_manager, "_capture_mem_samples", None)
        if profile_only and samples:
            self._first_graph_bytes = max(0, int(samples[0]))
        return taken

    def prepare_graphs(self) -> int:
        """Capture the CUDA graphs of all trees with their group active; returns their bytes."""
        taken = 0
        for mode in self._trees:
            self.use(mode)
            if self.needs_cudagraph_capture():
                with capturing(self._trees[mode]):
                    taken += int(self.capture_model())
        if self._prompt_graphs is not None:
            self.use(self._first, reads_prompts=True)
            taken += int(self.capture_model())
        self.use(self._first)
        return taken

    def warm(self) -> None:
        """Compute once in each mode, and prefills and decodes with all that sampling can do.

        vLLM compiles the small kernels that prepare a step when they are first used, 2.5 s of
        them: no task should wait for that. All ranks of the group must call it together.
        """
        for mode in self._trees:
            self.use(mode)
            # Large enough for NCCL, where custom all-reduce takes the small messages.
            self._dummy_run(self.max_num_tokens)
        self.use(self._first)
        warmup_kernels(self, self.execute_model, self.sample_tokens)
        # Sampling for as many tasks as there can be took a gigabyte, which is not needed soon.
        torch.accelerator.empty_cache()

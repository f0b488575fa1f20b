"""vLLM adapter: the runner of one mode on CUDA, vLLM's model runner V2 as it is.

V2 takes a ready module, continues a task from all its tokens, and draws by (seed, position); so
only the KV buffer needs a seam: vLLM's own allocation is answered with the rank's buffer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from kvadaptor.vllm_views import KVBuffer


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


class GpuModeRunner(GPUModelRunner):
    """vLLM's runner V2 over a ready module tree and the rank's KV buffer."""

    def __init__(self, config: VllmConfig, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, device)
        self.load_model(model=model)

    def adopt_kv(self, config: KVCacheConfig, kv: KVBuffer, width: int) -> None:
        """Use the rank's buffer as the KV cache of this width."""
        adopted = _AdoptedBuffer(kv.raw)
        self.initialize_kv_cache(config, kv_cache_allocation_context=adopted)
        assert adopted.adopted == 1, f"vLLM did not adopt the KV buffer in width {width}."

    def run(
        self,
        step: SchedulerOutput,
        grammar: GrammarOutput | None,
        resuming: Mapping[str, list[int]],
    ) -> Any:
        """Launch one step; the result may still be under way (`get_output` waits for it)."""
        output = self.execute_model(step)
        return self.sample_tokens(grammar) if output is None else output

    def expected_graph_bytes(self) -> tuple[int, int]:
        """What this mode's graphs will take: (working memory, the rest).

        vLLM captures the largest few, and forgets them. All graphs of all modes share one pool, so
        the working memory of the largest one serves them all. All ranks of the mode's group must
        call it together, with the group active.
        """
        self._first_graph_bytes = 0
        expected = int(self.profile_cudagraph_memory())
        working = min(expected, self._first_graph_bytes)
        return working, expected - working

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture; of a trial, remember what the first graph took."""
        taken = int(super().capture_model(profile_only=profile_only))
        samples = getattr(self.cudagraph_manager, "_capture_mem_samples", None)
        if profile_only and samples:
            self._first_graph_bytes = max(0, int(samples[0]))
        return taken

    def prepare_graphs(self) -> int:
        """Capture this mode's CUDA graphs with its group active; returns their bytes."""
        return int(self.capture_model()) if self.needs_cudagraph_capture() else 0

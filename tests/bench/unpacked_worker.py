"""vLLM's CPU worker with plain instead of prepacked linear layers: the fair peer of weight views.

Given to `vllm serve` as `--worker-cls tests.bench.unpacked_worker.UnpackedWorker`.
"""

import torch
from vllm.model_executor.layers import utils as layer_utils
from vllm.v1.worker.cpu_worker import CPUWorker


def _plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class UnpackedWorker(CPUWorker):
    """Every weight stays as it was loaded."""

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Load without oneDNN's prepacking."""
        layer_utils.dispatch_cpu_unquantized_gemm = _plain
        super().load_model(*args, **kwargs)

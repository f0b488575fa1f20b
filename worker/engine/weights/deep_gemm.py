"""vLLM adapter: DeepGEMM's kernels, which are compiled at first use, for each number of tokens.

vLLM compiles them before it serves, for layers that note their kernel while their weights are
processed. Views and layers that a process has found in memory are not processed.
"""

from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear import (
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm.utils.deep_gemm import is_deep_gemm_supported

from worker.engine.weights.fp8 import kernel_of

PROVIDER = "deep_gemm_warmup_provider"
"""Name of the attribute in which vLLM looks for the kernel."""


def warm_deep_gemm(tree: nn.Module, max_tokens: int) -> None:
    """Compile what the layers of a tree need for steps of up to `max_tokens` tokens."""
    if is_deep_gemm_supported() and envs.VLLM_DEEP_GEMM_WARMUP != "skip":
        note_kernels(tree)
        deep_gemm_warmup(tree, max_tokens)


def note_kernels(tree: nn.Module) -> None:
    """Note DeepGEMM's kernel on the layers that compute with it, and on no others.

    A view has the note of the layer that it is a view of, but may have another kernel.
    """
    for layer in tree.modules():
        if not isinstance(layer, LinearBase):
            continue
        kernel = kernel_of(layer)
        if isinstance(kernel, FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
            kernel = kernel.fallback
        if isinstance(kernel, DeepGemmFp8BlockScaledMMKernel):
            setattr(layer, PROVIDER, kernel)
        elif hasattr(layer, PROVIDER):
            delattr(layer, PROVIDER)

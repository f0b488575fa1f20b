"""vLLM adapter: lets the gates of a tree's feed-forward layers run our kernel where rows are few.

`plug_silu` replaces the method that vLLM's `SiluAndMul` modules call, not the modules: vLLM finds
fused kernels of silu and quantization by the module's exact class, and keeps them. Which kernel
runs depends on the shape alone, so a CUDA graph always holds the right one (docs/adr/0067).
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul

ROWS_MAX = 256
"""Maximum rows for which our kernel runs: on an H200 it wins up to there.

With more, vLLM's kernel has several programs for each of the 132 multiprocessors.
"""

Activation = Callable[[torch.Tensor], torch.Tensor]


def plug_silu(tree: nn.Module, config: VllmConfig, device_type: str = "cuda") -> int:
    """Let every plain silu gate of `tree` run our kernel up to `ROWS_MAX` rows.

    Modules that trees share change once; other activations, and experts, which call no module, stay
    vLLM's. Call it before CUDA graphs are captured: it compiles.

    Returns:
        The number of changed modules. It is 0 on devices other than `device_type` (tests run the
        kernel's interpreter on cpu), without Triton, and under torch.compile, which fuses the gate
        itself. Calling it again changes nothing.
    """
    if config.device_config.device_type != device_type or find_spec("triton") is None:
        return 0
    if config.compilation_config.mode not in (None, CompilationMode.NONE):
        return 0
    from worker.engine.weights.silu_kernel import DTYPES, compile_silu_mul, silu_mul

    dtype = config.model_config.dtype
    if dtype not in DTYPES:
        return 0
    plugged = [each for each in tree.modules() if _runs_vllms_kernel(each)]
    if plugged:
        compile_silu_mul(dtype, torch.device(device_type))
    for module in plugged:
        module._forward_method = partial(silu_of_rows, silu_mul, module._forward_method)
    return len(plugged)


def silu_of_rows(ours: Activation, vllms: Activation, x: torch.Tensor) -> torch.Tensor:
    """(…, [gate | up]) -> (…, inner), by `ours` for up to `ROWS_MAX` rows, else by `vllms`."""
    return (ours if x.shape[:-1].numel() <= ROWS_MAX else vllms)(x)


def _runs_vllms_kernel(module: nn.Module) -> bool:
    """Return whether this is vLLM's class itself, which runs its own kernel for NVIDIA GPUs."""
    return type(module) is SiluAndMul and module._forward_method == module.forward_cuda

"""vLLM's Triton kernel of block-scaled fp8 on CPU, with its product in plain torch.

vLLM's CPU kernels of such weights pack them, which GPUs' do not. What loads, quantizes and selects
here is vLLM's; `block_cases.py` runs the product itself in Triton's interpreter.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.platforms.interface import PlatformEnum


def spread(scales: torch.Tensor, block: list[int], shape: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks -> one for each number of a matrix of this shape."""
    rows, columns = block
    found = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return found[: shape[0], : shape[1]]


def block_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    block: list[int],
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """(T, K) fp8 · (N, K) fp8 -> (T, N); scales by (1, columns) and by block."""
    tokens = a.float() * spread(scale_a, [1, block[1]], (len(a), a.shape[1]))
    weight = b.float() * spread(scale_b, block, (b.shape[0], b.shape[1]))
    return (tokens @ weight.t()).to(dtype)


@contextmanager
def triton_blocks_on_cpu() -> Iterator[None]:
    """Let vLLM choose its Triton kernel for block scales, as on a GPU without others."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = [TritonFp8BlockScaledMMKernel]
        patch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, kernels)
        supported = classmethod(lambda *_: (True, None))
        patch.setattr(TritonFp8BlockScaledMMKernel, "is_supported", supported)
        patch.setattr(fp8_utils, "w8a8_triton_block_scaled_mm", block_product)
        yield

"""vLLM's block-scaled product under Triton's interpreter, over a range of a weight's columns.

`test_interpreted_kernels.py` runs it: vLLM leaves Triton out on CPU, so the kernel is given Triton
here.
"""

import pytest
import torch
import triton
import triton.language as tl
from vllm.model_executor.layers.quantization.utils import fp8_utils

from tests.harness.vllm.block_kernels import block_product

FP8 = torch.float8_e4m3fn
BLOCK = [32, 32]


@pytest.fixture(autouse=True)
def real_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fp8_utils._w8a8_triton_block_scaled_mm
    monkeypatch.setattr(fp8_utils, "tl", tl)
    monkeypatch.setattr(fp8_utils, "triton", triton)
    plain = getattr(kernel, "fn", kernel)
    monkeypatch.setattr(fp8_utils, "_w8a8_triton_block_scaled_mm", triton.jit(plain))


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_range_of_columns_is_multiplied_right(tokens: int, part: int) -> None:
    """Its rows lie as far apart as those of the whole; scales are one piece, transposed."""
    draw = torch.Generator().manual_seed(tokens + part)
    outputs, inputs, parts = 96, 64, 3
    whole = torch.randn((outputs, parts * inputs), generator=draw).to(FP8)
    scales = torch.rand((outputs // 32, parts * inputs // 32), generator=draw) + 0.1
    a = torch.randn((tokens, inputs), generator=draw).to(FP8)
    scale_a = torch.rand((tokens, inputs // 32), generator=draw) + 0.1
    weight = whole[:, part * inputs : (part + 1) * inputs]
    pieces = scales.t().contiguous().unflatten(0, (parts, -1))
    own = pieces[part].t()
    assert weight.stride(0) == parts * inputs
    assert own.stride() == (1, outputs // 32)
    found = fp8_utils.w8a8_triton_block_scaled_mm(a, weight, scale_a, own, BLOCK, torch.float32)
    wanted = block_product(a, weight, scale_a, own, BLOCK, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    packed = whole.flatten()[: outputs * inputs].view(outputs, inputs)
    wrong = block_product(a, packed, scale_a, own, BLOCK, torch.float32)
    assert not torch.allclose(found, wrong, rtol=1e-2, atol=1e-2)

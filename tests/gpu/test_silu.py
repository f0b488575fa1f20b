"""The silu kernel gives the bits of vLLM's own on a GPU, also in a graph and through a tree's gate.

Needs one NVIDIA GPU and vLLM's CUDA build, and takes seconds once torch is imported:
`python -m pytest -m gpu tests/gpu/test_silu.py`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROWS = (1, 2, 3, 7, 16, 33, 64, 100, 127, 128, 129, 255, 256, 257, 513, 1000, 1023, 1024)
WIDTHS = (14_336, 7_168, 3_584, 1_000, 257, 8, 1)
"""Elements of a result's row: shapes of models, and some without whole vectors."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {2: torch.int16, 4: torch.int32}


def of_vllm(x: torch.Tensor) -> torch.Tensor:
    """What vLLM's kernel gives for contiguous rows."""
    from vllm import _custom_ops  # noqa: F401

    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(out, x.contiguous())
    return out


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ, of which not both are no numbers."""
    assert a.shape == b.shape and a.dtype == b.dtype
    kind = BITS[a.element_size()]
    return int(((a.view(kind) != b.view(kind)) & ~(a.isnan() & b.isnan())).sum())


def rows_of(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, some of them large."""
    torch.manual_seed(rows)
    return (torch.randn(rows, 2 * width, device="cuda") * 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_all_sizes_have_the_bits_of_vllms_kernel(width: int, dtype: torch.dtype) -> None:
    from worker.engine.weights.silu_kernel import silu_mul

    for rows in ROWS:
        x = rows_of(rows, width, dtype)
        wanted = of_vllm(x)
        for per_thread in (None, 2, 8):
            assert differing(silu_mul(x, per_thread), wanted) == 0, (rows, per_thread)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_16_bit_gate_has_the_bits_of_vllms_kernel(dtype: torch.dtype) -> None:
    from worker.engine.weights.silu_kernel import silu_mul

    every = torch.arange(1 << 16, device="cuda").to(torch.int16).view(dtype)
    torch.manual_seed(0)
    for _ in range(16):
        up = every[torch.randperm(1 << 16, device="cuda")]
        x = torch.cat([every.view(64, 1024), up.view(64, 1024)], -1)
        assert differing(silu_mul(x), of_vllm(x)) == 0


def test_any_fp32_has_the_bits_of_vllms_kernel() -> None:
    from worker.engine.weights.silu_kernel import silu_mul

    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1024, 8192), device="cuda", dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    assert differing(silu_mul(x), of_vllm(x)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_wherever_they_lie(dtype: torch.dtype) -> None:
    from worker.engine.weights.silu_kernel import silu_mul

    x = rows_of(66, 1_000, dtype)
    apart = torch.full((66, 2_064), torch.nan, dtype=dtype, device="cuda")
    apart[:, 64:] = x
    odd = torch.full((66 * 2_003 + 1,), torch.nan, dtype=dtype, device="cuda")
    odd = odd[1:].view(66, 2_003)[:, :2_000]
    odd.copy_(x)
    assert differing(silu_mul(apart[:, 64:]), of_vllm(x)) == 0
    assert differing(silu_mul(odd), of_vllm(x)) == 0
    assert differing(silu_mul(x.t().contiguous().t()), of_vllm(x)) == 0
    assert differing(silu_mul(x[::3]), of_vllm(x[::3])) == 0
    assert differing(silu_mul(x.view(2, 33, 2_000)), of_vllm(x).view(2, 33, 1_000)) == 0
    assert silu_mul(x[:0]).shape == (0, 1_000)


@pytest.mark.parametrize("rows", [1, 128, 129])
def test_a_plugged_gate_has_vllms_bits_plainly_and_in_a_graph(rows: int) -> None:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul

    from worker.engine.weights import silu_kernel
    from worker.engine.weights.silu import plug_silu

    compilation = CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"])
    config = VllmConfig(compilation_config=compilation)
    with set_current_vllm_config(config):
        tree = nn.Sequential(SiluAndMul())
    # A configuration without a model has no type.
    given: Any = SimpleNamespace(
        device_config=config.device_config,
        compilation_config=compilation,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    x = rows_of(rows, 7_168, torch.bfloat16)
    assert plug_silu(tree, given) == 1
    compiled = len(silu_kernel._silu_mul.device_caches[torch.cuda.current_device()][0])
    assert differing(tree(x), of_vllm(x)) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree(x)
    x.copy_(x.flip(0) * 0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert differing(out, of_vllm(x)) == 0
    after = len(silu_kernel._silu_mul.device_caches[torch.cuda.current_device()][0])
    assert after == compiled, "a launch compiled what plug_silu should have compiled"

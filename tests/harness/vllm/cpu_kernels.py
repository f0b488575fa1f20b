"""vLLM's CPU kernels for quantized weights, in plain torch and any float type.

Its build has them for processors with AVX-512 (4 bits) or AMX (fp8) alone. Their products are
replaced here; what loads, packs and selects is vLLM's.
"""

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels.linear import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

BITS, PER_WORD = 4, 8
COLUMNS = 16
"""Outputs of a block in vLLM's packed form."""


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """(..., B) words -> (..., 8·B) integers below 16."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def cpu_gemm_wna16(
    input: torch.Tensor,  # noqa: A002 -- vLLM's name
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """(..., K) · 4-bit (K, N) -> (..., N)."""
    blocks = q_weight.unflatten(1, (-1, COLUMNS // pack_factor))
    values = _nibbles(blocks).permute(1, 0, 2).flatten(1).float()
    group = len(values) // len(scales)
    zero = torch.full_like(scales, 8.0) if zeros is None else _nibbles(zeros)
    values = values - zero.float().repeat_interleave(group, 0)
    weight = values * scales.float().repeat_interleave(group, 0)
    out = input.float() @ weight
    return (out if bias is None else out + bias.float()).to(input.dtype)


def fp8_scaled_mm_cpu(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    scales2: torch.Tensor,
    block_size: list[int],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> torch.Tensor:
    """(T, K) · (N, K) fp8 with a scale per block -> (T, N)."""
    assert not is_vnni, "the weight is as it was loaded."
    rows, columns = block_size
    scales = scales2.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    weight = mat2.float() * scales[: mat2.shape[0], : mat2.shape[1]]
    out = mat1.float() @ weight.t()
    return (out if bias is None else out + bias.float()).to(out_dtype)


def install() -> None:
    """Let vLLM in this process, and in those that it forks, compute with these."""
    _custom_ops.cpu_gemm_wna16 = cpu_gemm_wna16
    library = torch.library.Library("_C", "FRAGMENT")
    _KEPT.append(library)
    if not hasattr(torch.ops._C, "fp8_scaled_mm_cpu"):
        library.define(
            "fp8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, "
            "Tensor? bias, ScalarType out_dtype, bool is_vnni) -> Tensor"
        )
    library.impl("fp8_scaled_mm_cpu", fp8_scaled_mm_cpu, "CPU", allow_override=True)
    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda *_: (True, None))
    for each in (AutoAWQConfig, AutoGPTQConfig, Fp8Config):
        each.get_supported_act_dtypes = classmethod(lambda _: [torch.float32, torch.bfloat16])


_KEPT: list[torch.library.Library] = []
"""A library ends with its last reference."""

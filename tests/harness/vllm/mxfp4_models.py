"""A tiny random gpt-oss with experts in MXFP4, as it is published, and the plain one it means."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GptOssConfig

from tests.harness.vllm.quantized_models import store_pair
from tests.harness.vllm.tiny_models import LONG, make_model

GROUP = 32
"""Numbers that share a power of two."""
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What four bits without their sign stand for."""
SIGN = 8
BIAS = 127
"""Of a scale's exponent."""
CONFIG = GptOssConfig(
    **{**LONG, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128},
    head_dim=64,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=64,
    layer_types=["sliding_attention", "full_attention"],
    rope_scaling=None,
    tie_word_embeddings=False,
)


QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
        *("model.embed_tokens", "lm_head"),
    ],
}


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., K) -> (..., K / 32, 16) pairs of four bits, the lower ones first, and (..., K / 32)."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-100) / VALUES[-1]))
    steps = groups / torch.exp2(exponents).unsqueeze(-1)
    nearest = (steps.abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    codes = (nearest + SIGN * (steps < 0)).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4, (exponents + BIAS).to(torch.uint8)


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(..., K / 2) bytes in one row or in groups, and (..., K / 32) -> (..., K) fp32."""
    pairs = blocks.flatten(-2) if blocks.dim() > scales.dim() else blocks
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    signs = torch.where(codes >= SIGN, -1.0, 1.0)
    numbers = VALUES[(codes % SIGN).long()] * signs
    steps = torch.exp2(scales.float() - BIAS).repeat_interleave(GROUP, -1)
    return numbers * steps


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """Write it; returns its folder, and that of the plain one."""
    plain, own = folder / "gpt-oss-plain", folder / "gpt-oss"
    make_model(plain, CONFIG)
    stored: dict[str, torch.Tensor] = {}
    state = load_file(plain / "model.safetensors")
    for name, weight in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = quantized(weight.transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight.copy_(dequantized(blocks, scales).transpose(1, 2))
        else:
            stored[name] = weight.clone()
    store_pair(plain, state, own, stored, QUANTIZATION)
    return own, plain

"""Tiny random checkpoints in quantized forms, each beside the plain one that it stands for.

The plain checkpoint has the weights that the quantized one means, in fp32, so plain vLLM's result
of it is the reference.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.harness.coordinator.model_folders import change
from tests.harness.vllm.tiny_models import LONG, make_model, model_of

BITS, PER_WORD = 4, 8
GROUP = 32
BLOCK = 128
FP8_MAX = 448.0
INPUT_SCALE = 8 / FP8_MAX
"""Of activations, where the checkpoint has one: they are below 8."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns lies in each four bits of a word, from the lowest."""

WIDE: dict[str, Any] = {**LONG, "head_dim": 64, "intermediate_size": 512}
"""Halves of every layer are whole blocks."""
SHAPES: dict[str, Any] = {
    "awq": LlamaConfig(**LONG, tie_word_embeddings=False),
    "gptq": Qwen3Config(
        **{**LONG, "num_key_value_heads": 1}, head_dim=32, tie_word_embeddings=True
    ),
    "fp8-block": LlamaConfig(**WIDE, tie_word_embeddings=False),
    "fp8-block-moe": Qwen3MoeConfig(
        **WIDE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128
    ),
    **dict.fromkeys(
        ("fp8-channel", "fp8-static", "fp8-modelopt"),
        Qwen2Config(**LONG, tie_word_embeddings=False),
    ),
}
FP8_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights: str, inputs: str, *, dynamic: bool, block: int = BLOCK) -> dict[str, Any]:
    """Compressed-tensors' configuration of fp8 weights and inputs with scales of these kinds."""
    blocks = {"block_structure": [block, block]} if weights == "block" else {}
    groups = {"group_size": block} if inputs == "group" else {}
    numbers = {
        "weights": {**FP8_NUMBERS, **blocks, "strategy": weights, "dynamic": False},
        "input_activations": {**FP8_NUMBERS, **groups, "strategy": inputs, "dynamic": dynamic},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **numbers}},
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
    },
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}
KINDS = tuple(CONFIGS)
"""Those that are served over parts in tests."""
CONFIGS |= {
    "fp8-channel": compressed("channel", "token", dynamic=True),
    "fp8-static": compressed("tensor", "tensor", dynamic=False),
    "fp8-modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
}
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(WIDE["num_hidden_layers"])]
CONFIGS["fp8-block-moe"] = {**CONFIGS["fp8-block"], "modules_to_not_convert": ["lm_head", *GATES]}


def write_quantized(folder: Path, kind: str) -> tuple[Path, Path]:
    """Write a model of a kind; returns its folder, and that of the plain one."""
    plain, quantized = folder / f"{kind}-plain", folder / kind
    make_model(plain, SHAPES[kind])
    stored: dict[str, torch.Tensor] = {}
    # A checkpoint has each expert by itself; the model may have them in one tensor.
    state = load_file(plain / "model.safetensors")
    for name, weight in state.items():
        if "layers." in name and name.endswith("proj.weight"):
            parts, meant = QUANTIZE[kind](weight)
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
            weight.copy_(meant)
        else:
            stored[name] = weight.clone()
    store_pair(plain, state, quantized, stored, CONFIGS[kind])
    return quantized, plain


def store_pair(
    plain: Path,
    state: Mapping[str, torch.Tensor],
    quantized: Path,
    stored: Mapping[str, torch.Tensor],
    described: Mapping[str, Any],
) -> None:
    """Store the weights that a quantized model means, and the model beside, as `described`."""
    save_file({**state}, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, quantized)
    save_file({**stored}, quantized / "model.safetensors", metadata={"format": "pt"})
    change(quantized, quantization_config=described)


def plain_model(name: str, folder: Path) -> Path:
    """The model of a name; of a quantized one, that with the weights which it means."""
    return write_quantized(folder, name)[1] if name in CONFIGS else model_of(name, folder)


def _packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(PER_WORD))) -> torch.Tensor:
    """(A, B) integers below 16 -> (A, B / 8) words."""
    found = values.to(torch.int64).unflatten(-1, (-1, PER_WORD))
    words = sum(found[..., column] << (BITS * place) for place, column in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    """(out, in) -> (groups, GROUP, out): inputs that share a scale."""
    return weight.t().contiguous().unflatten(0, (-1, GROUP))


def _awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = _grouped(weight)
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    steps = scales.float().unsqueeze(1)
    values = (groups / steps + zeros.unsqueeze(1)).round().clamp(0, 15)
    meant = ((values - zeros.unsqueeze(1)) * steps).flatten(0, 1).t()
    stored = {
        "qweight": _packed(values.flatten(0, 1), AWQ_ORDER),
        "qzeros": _packed(zeros, AWQ_ORDER),
        "scales": scales,
    }
    return stored, meant


def _gptq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = _grouped(weight)
    scales = (groups.abs().amax(1) / 7).half()
    steps = scales.float().unsqueeze(1)
    values = (groups / steps + 8).round().clamp(0, 15)
    meant = ((values - 8) * steps).flatten(0, 1).t()
    rows = values.flatten(0, 1)
    stored = {
        "qweight": _packed(rows.t().contiguous()).t().contiguous(),
        # Stored one too low, as this form has always been.
        "qzeros": _packed(torch.full_like(scales, 7)),
        "scales": scales,
        "g_idx": (torch.arange(len(rows)) // GROUP).to(torch.int32),
    }
    return stored, meant


def _fp8_block(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / FP8_MAX
    steps = scales[:, None, :, None]
    values = (blocks / steps).to(torch.float8_e4m3fn)
    meant = (values.float() * steps).flatten(2, 3).flatten(0, 1)
    return {"weight": values.flatten(2, 3).flatten(0, 1), "weight_scale_inv": scales}, meant


def _fp8_channel(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def _fp8_static(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax() / FP8_MAX
    values = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(INPUT_SCALE)}
    return stored, values.float() * scale


QUANTIZE = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8-block": _fp8_block,
    "fp8-block-moe": _fp8_block,
    "fp8-channel": _fp8_channel,
    "fp8-static": _fp8_static,
    "fp8-modelopt": _fp8_static,
}

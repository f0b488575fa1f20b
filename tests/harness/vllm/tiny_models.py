"""Tiny random checkpoints of the families that tests serve."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.harness.cells.servers import MODEL
from tests.harness.coordinator.model_folders import change
from tests.harness.vllm.families import BY_SLUG, Family
from tests.harness.vllm.families import SIZES as FAMILY_SIZES
from tests.harness.vllm.plain_models import build_plain

VOCABULARY = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 3,
}


def make_model(folder: Path, config: Any) -> Any:
    """A random model whose biases and norms are not trivial, with the demo model's tokenizer."""
    torch.manual_seed(1)
    model = build_plain(config).float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return model


LONG: dict[str, Any] = {**SIZES, "max_position_embeddings": 1024, "initializer_range": 0.05}
MODELS: dict[str, Any] = {
    # Padded it is 65 x 64, so no part of it is a multiple of 64.
    "untied": LlamaConfig(**{**LONG, "vocab_size": 4132}, tie_word_embeddings=False),
    "four-layers": LlamaConfig(**{**LONG, "num_hidden_layers": 4}),
    "qkv-bias": Qwen2Config(**LONG, tie_word_embeddings=False),
    "one-kv-head": Qwen3Config(**{**LONG, "num_key_value_heads": 1}, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(
        **{**LONG, "num_key_value_heads": 2},
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "mixtral": MixtralConfig(
        **{**LONG, "num_key_value_heads": 2}, num_local_experts=8, num_experts_per_tok=2
    ),
}


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
KV_QUANTIZED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {},
    "kv_cache_scheme": {**KV_SCHEME, "dynamic": False},
}
"""As checkpoints say that only their KV cache is quantized, with scales of their own."""


def make_kv_scales(folder: Path) -> Path:
    """A model with plain weights and with scales of K and V, which differ by layer."""
    make_model(folder, LlamaConfig(**LONG, tie_word_embeddings=False))
    weights = load_file(folder / "model.safetensors")
    for layer in range(LONG["num_hidden_layers"]):
        for name, scale in (("k", 0.003 * (layer + 1)), ("v", 0.001 * (layer + 2))):
            weights[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change(folder, quantization_config=KV_QUANTIZED)
    return folder


def make_family(family: Family, folder: Path) -> Path:
    """Write the checkpoint of a family: random, with biases and norms that are not trivial."""
    given = {**FAMILY_SIZES, **family.fields}
    fields = {name: value for name, value in given.items() if value is not ...}
    make_model(folder, AutoConfig.for_model(family.kind, **fields))
    return folder


def model_of(name: str, folder: Path) -> Path:
    """The demo model, or one of these, which is made in the folder."""
    if name == "demo":
        return MODEL
    if name == "kv-scales":
        return make_kv_scales(folder / name)
    if name in BY_SLUG:
        return make_family(BY_SLUG[name], folder / name)
    make_model(folder / name, MODELS[name])
    return folder / name

"""A tiny random Qwen3-MoE of two layers, as tests of trees have it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.harness.vllm.trees import HEAD, HEADS, HIDDEN, INNER, LAYERS

EXPERTS = 8


def write_experts(folder: Path, **changes: Any) -> Path:
    """Write it in fp32 with these changes of its configuration; returns its folder."""
    given: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "moe_intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**{**given, **changes})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder

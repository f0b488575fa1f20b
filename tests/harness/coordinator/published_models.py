"""What config.json of published models says, as far as sizes need it."""

import json
from pathlib import Path

QWEN3_32B = {
    "hidden_size": 5_120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 25_600,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    "hidden_size": 2_048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}


CONFIGS = {
    "Qwen/Qwen3-32B": {
        **QWEN3_32B,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen3-30B-A3B": {
        **QWEN3_30B_A3B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "max_position_embeddings": 40_960,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "torch_dtype": "bfloat16",
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8_192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}
"""Hugging Face id -> what its config.json says."""


def fill_cache(cache: Path) -> None:
    """Write these files as Hugging Face's cache holds them: a hub that is not reached has them."""
    for name, config in CONFIGS.items():
        folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / "main"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))

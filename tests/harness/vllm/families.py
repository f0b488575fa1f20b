"""Tiny random checkpoints, one per family of models that people serve, and what is special of each.

Pure data. docs/models.md is generated from it, and the product's table of
tested architectures is compared with it.
"""

import re
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One family: which configuration of transformers makes its checkpoint, and with what."""

    name: str
    """As people call it."""
    kind: str
    """transformers' name of the configuration (`model_type`)."""
    special: str
    """What is special about its layers."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Beside SIZES; `...` leaves one of these out."""
    refused: str = ""
    """Why it is served with --widths 1 alone; part of the sentence that says so."""

    @property
    def slug(self) -> str:
        """Its name as a part of paths."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


WINDOW = 48
"""A sliding window that is much shorter than the prompts."""

FAMILIES = (
    Family("Llama 3", "llama", "scaled RoPE", {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "tie_word_embeddings": False,
    }),
    Family("Qwen2, Qwen2.5", "qwen2", "bias of qkv, tied head", {"tie_word_embeddings": True}),
    Family("Qwen3", "qwen3", "qk-norm", {"head_dim": 64, "tie_word_embeddings": False}),
    Family("Mistral", "mistral", "no window", {"sliding_window": None}),
    Family("Mistral 7B v0.1", "mistral", "sliding window", {"sliding_window": WINDOW}),
    Family("Phi-3, Phi-4", "phi3", "fused qkv and gate-up on disk", {"sliding_window": None}),
    Family("Phi-4 mini", "phi3", "partial RoPE, sliding window, tied head", {
        "sliding_window": WINDOW, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    }),
    Family("OLMo 2", "olmo2", "norms after layers, qk-norm over all heads"),
    Family("OLMo 3", "olmo3", "the same, sliding windows", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    }),
    Family("Granite", "granite", "multipliers of embeddings, attention, residuals and logits", {
        "embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
    }),
    Family("GLM-4 9B", "glm", "partial RoPE, bias of qkv", {
        "head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5,
    }),
    Family("GLM-4 0414", "glm4", "sandwich norms, partial RoPE", {
        "head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5,
    }),
    Family("SmolLM3", "smollm3", "layers without RoPE", {
        "no_rope_layers": [1, 0], "tie_word_embeddings": True,
    }),
    Family("Seed-OSS", "seed_oss", "bias of qkv", {"head_dim": 32}),
    Family("Gemma", "gemma", "scaled embeddings, one KV head", {
        "head_dim": 64, "num_key_value_heads": 1,
    }),
    Family("Gemma 2", "gemma2", "soft caps, sandwich norms, sliding windows", {
        "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
    }),
    Family("Gemma 3 (text)", "gemma3_text", "sandwich norms, qk-norm, sliding windows, two RoPEs", {
        "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    Family("Phi-1.5, Phi-2", "phi", "parallel attention and feed-forward, biases", {
        "partial_rotary_factor": 0.5, "num_key_value_heads": 4,
    }),
    Family("Mixtral 8x7B", "mixtral", "experts", {
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    Family("Qwen3 MoE (A3B)", "qwen3_moe", "experts, qk-norm", {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }),
    Family("Qwen2 MoE", "qwen2_moe", "experts, a gated shared expert, bias of qkv", {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }),
    Family("OLMoE", "olmoe", "experts, qk-norm over all heads", {
        "num_experts": 8, "num_experts_per_tok": 2,
    }),
    Family("GLM-4.5", "glm4_moe", "experts in groups, shared expert, a dense layer", {
        "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1, "use_qk_norm": True,
    }),
    Family("Llama 4 (text, one chunk)", "llama4_text", "experts and a shared expert", {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256, "attention_chunk_size": None, "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 1,
    }),
    Family("gpt-oss", "gpt_oss", "attention sinks, sliding windows, experts", {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    }, refused="experts with biases, of which vLLM's CPU kernel computes all or none"),
    Family("Cohere Command R", "cohere", "parallel attention and feed-forward, logit scale", {
        "logit_scale": 0.25, "use_qk_norm": True,
    }),
    Family("Cohere Command R7B", "cohere2", "sliding windows, layers without RoPE", {
        "logit_scale": 0.25, "sliding_window": WINDOW, "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    Family("StarCoder2", "starcoder2", "plain feed-forward, biases, sliding window", {
        "sliding_window": WINDOW, "use_bias": True,
    }),
    Family("Pythia, GPT-NeoX", "gpt_neox", "interleaved qkv on disk, plain feed-forward", {
        "rotary_pct": 0.25, "num_key_value_heads": ...,
    }),
    Family("StableLM 2", "stablelm", "LayerNorm, partial RoPE", {"partial_rotary_factor": 0.25}),
    Family("Nemotron", "nemotron", "plain feed-forward, partial RoPE", {
        "partial_rotary_factor": 0.5, "head_dim": 32,
    }),
    Family("Arcee AFM", "arcee", "plain feed-forward", {}),
    Family("EXAONE 4", "exaone4", "norms after layers, sliding windows, qk-norm", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    }),
    Family("Ernie 4.5", "ernie4_5", "interleaved RoPE, tied head", {"head_dim": 32}),
    Family("Apertus", "apertus", "an activation with weights, qk-norm",
           refused="vLLM cannot build the model for a rank of width 2"),
    Family("Hunyuan", "hunyuan_v1_dense", "qk-norm after RoPE", {"head_dim": 32}),
    Family("GPT-2", "gpt2", "learned positions", {
        "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024, "num_key_value_heads": ...,
    }),
)  # fmt: skip
BY_SLUG = {family.slug: family for family in FAMILIES}
SERVED = tuple(family for family in FAMILIES if not family.refused)
REFUSED = tuple(family for family in FAMILIES if family.refused)

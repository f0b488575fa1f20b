"""What config.json of published models says, as far as sizes need it."""

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

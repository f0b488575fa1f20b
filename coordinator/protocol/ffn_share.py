"""How many weights a model has, and the share of its feed-forward layers. From config.json. Pure.

All served families have gated layers: three matrices for each, or for each expert.
"""

from collections.abc import Mapping
from typing import Any

_MATRICES = 3
_EXPERTS = ("num_experts", "num_local_experts")


def ffn_share(config: Mapping[str, Any]) -> float | None:
    """Return the share of the weights that all feed-forward layers have; None if it is unknown.

    It counts elements. Where a checkpoint stores linear layers in fewer bits than embeddings, the
    share of the bytes is a little smaller.
    """
    ffn, rest = _elements(config) or (0, 0)
    return ffn / (ffn + rest) if ffn + rest > 0 else None


def billions_of(config: Mapping[str, Any]) -> float | None:
    """Return about how many billion weights the model has; None if that is unknown."""
    elements = _elements(config)
    return sum(elements) / 1e9 if elements is not None else None


def _elements(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the elements of feed-forward layers, and of the other matrices."""
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        attention = 2 * hidden * head * (heads + kv_heads)
        embeddings = int(config["vocab_size"]) * hidden
        experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
        inner = int(
            (experts and config.get("moe_intermediate_size")) or config["intermediate_size"]
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    ffn = layers * _MATRICES * hidden * inner * max(1, experts)
    rest = layers * attention + embeddings * (1 if config.get("tie_word_embeddings") else 2)
    return ffn, rest


def whole_share(config: Mapping[str, Any], whole_layers: int) -> float:
    """Return the share of the layers that every rank holds whole; 0 if their number is unknown."""
    layers = config.get("num_hidden_layers")
    return min(1.0, whole_layers / layers) if isinstance(layers, int) and layers > 0 else 0.0

"""The longest request that a model allows, as vLLM derives it from config.json. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

LENGTH_DEFAULT = 2_048
"""vLLM's length for models that do not say theirs, in tokens."""
LENGTH_MAX = 2**40
"""Larger numbers stand for no limit, in tokens."""
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose `max_position_embeddings` is scaled already."""


def model_length(config: Mapping[str, Any]) -> int:
    """Return the most tokens of one request, prompt and answer; a tokenizer may allow fewer."""
    named = [length for name in _LENGTHS if (length := _length(config.get(name)))]
    longest = _length(config.get("model_max_length")) or min(named, default=LENGTH_DEFAULT)
    kinds = list(_ropes(config))
    if any(_kind(rope) == "longrope" for rope in kinds):
        return int(_length(config.get("original_max_position_embeddings")) or longest)
    if "gemma3" not in str(config.get("model_type")):
        factors = [_length(rope.get("factor")) for rope in kinds if _kind(rope) not in _SCALED]
        longest *= next(filter(None, factors), 1)
    return int(longest)


def _length(value: object) -> float:
    """Return a positive number as it is, and 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if 0 < value < LENGTH_MAX else 0


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each kind of RoPE that a config.json names."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if not isinstance(found, Mapping):
            continue
        by_layer = [each for each in found.values() if isinstance(each, Mapping)]
        yield from by_layer or [found]

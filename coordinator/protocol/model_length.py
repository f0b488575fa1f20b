"""The longest request that a model allows, as vLLM derives it from config.json. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

LENGTH_DEFAULT = 2_048
"""vLLM's length for models that do not say theirs, in tokens."""
ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's variable of users who want longer requests than config.json allows."""
WINDOWLESS = "--disable-sliding-window"
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
    longest = _derived_length(config) or _scaled(config, LENGTH_DEFAULT)
    if any(_kind(rope) == "longrope" for rope in _ropes(config)):
        return int(_length(config.get("original_max_position_embeddings")) or longest)
    return int(longest)


def length_refusal(
    config: Mapping[str, Any],
    asked: int,
    environment: Mapping[str, str],
    *,
    is_windowless: bool = False,
) -> str | None:
    """Return the sentence about requests of `asked` tokens that vLLM refuses at start, or None.

    Without sliding windows (`is_windowless`) requests are as long as a window at most. vLLM's
    variable for longer requests counts here as well.
    """
    longest, own = _derived_length(config), _length(config.get("model_max_length"))
    window = _window(config) if is_windowless else 0
    allows = environment.get(ALLOW_LONG, "").strip().lower() in ("1", "true")
    is_bound = 0 < window < (longest or LENGTH_DEFAULT)
    if is_bound and max(window, own) < asked and not allows:
        return (
            f"--max-model-len {asked} is more than the model's sliding window of {int(window)} "
            f"tokens, which {WINDOWLESS} makes the longest request: leave {WINDOWLESS} out, or use "
            f"at most --max-model-len {int(window)}."
        )
    longest = max(longest, own)
    if not longest or asked <= longest or allows:
        return None
    return (
        f"--max-model-len {asked} is more than the {int(longest)} tokens that the model's "
        f"config.json allows: use at most --max-model-len {int(longest)}, or leave it out."
    )


def _window(config: Mapping[str, Any]) -> float:
    """Return the tokens of the model's sliding window; 0 if it has none."""
    if config.get("use_sliding_window") is False:
        return 0
    return _length(config.get("sliding_window"))


def _derived_length(config: Mapping[str, Any]) -> float:
    """Return vLLM's bound of `--max-model-len`, in tokens; 0 if config.json names none."""
    named = [length for name in _LENGTHS if (length := _length(config.get(name)))]
    return _scaled(config, _length(config.get("model_max_length")) or min(named, default=0))


def _scaled(config: Mapping[str, Any], length: float) -> float:
    """Return a length times the factor of RoPE that config.json has not applied to it."""
    if "gemma3" in str(config.get("model_type")):
        return length
    factors = [_length(rope.get("factor")) for rope in _ropes(config) if _kind(rope) not in _SCALED]
    return length * next(filter(None, factors), 1)


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

"""The probe of the numerical guard: fixed texts whose log-probabilities all modes must agree on.

Random tokens serve as well as sentences: a faulty layer changes the prediction after any token, and
no tokenizer is needed. Pure; `probe_steps` makes steps of the texts.
"""

TEXTS = 2
TEXT_TOKENS_MAX = 32
"""Maximum tokens of a text; fewer if a KV block is smaller, because a text stays within one."""

_MASK = (1 << 64) - 1

ERROR_MAX_NATS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
"""Largest error of a mode, by compute type.

Logits of around 16 are rounded to 1/8 in bf16 and to 1/64 in fp16, and modes add up in different
orders; a wrong layer is off by whole nats.
"""

ERROR_MAX_ROUGH_NATS = 0.5
"""The same with quantized activations, and with experts below fp32.

Modes scale different parts of activations; a little noise routes some tokens to other experts.
"""


def probe_texts(vocabulary: int, tokens_max: int) -> tuple[tuple[int, ...], ...]:
    """Return (TEXTS, T) token ids below `vocabulary`, the same on every rank.

    T is `tokens_max`, at most TEXT_TOKENS_MAX.
    """
    length = min(tokens_max, TEXT_TOKENS_MAX)
    return tuple(
        tuple(_scattered(number * TEXT_TOKENS_MAX + place) % vocabulary for place in range(length))
        for number in range(TEXTS)
    )


def error_max_nats(dtype: str, *, is_quantized: bool, has_experts: bool = False) -> float:
    """Return the largest error that is not drift, for a model of this type (`bfloat16`)."""
    if is_quantized or (has_experts and dtype != "float32"):
        return ERROR_MAX_ROUGH_NATS
    return ERROR_MAX_NATS.get(dtype, ERROR_MAX_NATS["bfloat16"])


def _scattered(number: int) -> int:
    """Return the finaliser of splitmix64: neighbouring numbers give unrelated ones."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)

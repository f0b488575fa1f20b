"""Every reference that the suite keeps: what plain vLLM computes, of which model, in which way.

Pure data. `make references` makes them anew, tests load them by name, and one of them is proved
fresh in each run (tests/integration/test_references.py).
"""

from dataclasses import dataclass
from typing import Literal

from tests.harness.vllm.families import SERVED

LENGTHS = (5, 6, 9, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 150, 200, 255, 300, 350, 400)
"""Tokens of the prompts of the demo model: around page borders and chunks, and far from them."""
FEW_LENGTHS = (5, 31, 32, 65, 128, 255, 300, 400)
"""Those of the other models, whose prompts are some of the same."""
FAMILY_LENGTHS = (9, 100)
"""Those of the families of models."""
SEEDS = 320
"""The random requests of test_reshard_random, of which a reference has the greedy ones."""


@dataclass(frozen=True)
class Entry:
    """One reference.

    `logits`: every step's logits for prompts of these lengths, and the scores of a text.
    `cases`: the greedy ones of the random requests, with whatever parameters they have.
    """

    name: str
    model: str
    lengths: tuple[int, ...] = FEW_LENGTHS
    tp: int = 1
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    kind: Literal["logits", "cases"] = "logits"


ENTRIES = (
    Entry("demo", "demo", LENGTHS),
    Entry("demo-tp2", "demo", LENGTHS, tp=2),
    Entry("demo-fp8-kv", "demo", FEW_LENGTHS, kv_cache_dtype="fp8"),
    Entry("demo-fp8-kv-tp2", "demo", FEW_LENGTHS, tp=2, kv_cache_dtype="fp8"),
    Entry("kv-scales", "kv-scales", kv_cache_dtype="fp8"),
    Entry("kv-scales-tp2", "kv-scales", tp=2, kv_cache_dtype="fp8"),
    Entry("demo-cases", "demo", (), kind="cases"),
    Entry("one-kv-head", "one-kv-head"),
    Entry("qwen3-moe", "qwen3-moe"),
    Entry("mixtral", "mixtral"),
    Entry("untied", "untied"),
    Entry("qkv-bias", "qkv-bias"),
    Entry("awq", "awq"),
    Entry("gptq", "gptq"),
    Entry("fp8-block", "fp8-block"),
    *(Entry(family.slug, family.slug, FAMILY_LENGTHS) for family in SERVED),
)
CATALOG = {entry.name: entry for entry in ENTRIES}

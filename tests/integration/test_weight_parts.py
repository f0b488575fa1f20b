"""Ranks that hold one part of the weights each compute what static vLLM computes with all of them.

Four ranks hold halves, two of them the same one, or quarters; the reference is plain vLLM (tp 1) in
a process of its own, and fp32 must agree to 1e-4.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from tests.harness.cells.servers import MODEL
from tests.harness.vllm.references import static
from tests.harness.vllm.step_checks import check_runs
from tests.harness.vllm.tiny_models import MOE, SIZES, make_model

pytestmark = [pytest.mark.slow, pytest.mark.exact, pytest.mark.timeout(600)]

RANKS = 4
HALVES: dict[str, Any] = {
    "parts": 2,
    "widths": [1, 2, 4],
    "mixed": ["sp2tp2"],
    "runs": ("sp2tp2", "random-1"),
}
QUARTERS: dict[str, Any] = {"parts": 4, "widths": [1, 4], "runs": ("tp",)}
LONG: dict[str, Any] = {**SIZES, "max_position_embeddings": 1024, "initializer_range": 0.05}
MODELS = {
    "untied": LlamaConfig(**LONG, tie_word_embeddings=False),
    "one-kv-head": Qwen3Config(**{**LONG, "num_key_value_heads": 1}, head_dim=32),
    "qwen3-moe": MOE["qwen3-moe"],
}


def weights_of(model: Path) -> int:
    """Bytes of the checkpoint's files, in fp32."""
    return sum(each.stat().st_size for each in model.glob("*.safetensors"))


def test_halves_and_quarters_of_the_demo_model(tmp_path: Path) -> None:
    """Embeddings, which the output shares, are whole on all ranks; all else is one part."""
    reference = static(tmp_path)
    halves = check_runs(tmp_path, RANKS, reference, MODEL, **HALVES)
    quarters = check_runs(tmp_path, RANKS, reference, MODEL, **QUARTERS)
    print("bytes of weights: halves", halves, "quarters", quarters)
    assert quarters < 0.7 * halves


@pytest.mark.parametrize("name", MODELS)
def test_halves_of_other_models(name: str, tmp_path: Path) -> None:
    model = tmp_path / name
    make_model(model, MODELS[name])
    reference = static(tmp_path, model)
    held = check_runs(tmp_path, RANKS, reference, model, **HALVES)
    total, embeddings = weights_of(model), 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    print(name, "bytes of weights", held, "of", total, "embeddings", embeddings)
    # Beside embeddings, norms and routers are on all ranks, and KV heads that ranks share.
    assert held < embeddings + 0.55 * (total - embeddings)

"""Ranks that hold one part of the weights each compute what static vLLM computes with all of them.

Four ranks hold halves, two of them the same one, or quarters; the reference is plain vLLM (tp 1),
as the repository keeps it, and fp32 must agree to 1e-4.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.servers import MODEL
from tests.harness.vllm.step_checks import MIXED, check_runs
from tests.harness.vllm.tiny_models import SIZES, model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

RANKS = 4
HALVES: dict[str, Any] = {"ranks": RANKS, "parts": 2, **MIXED}
QUARTERS: dict[str, Any] = {"ranks": RANKS, "parts": 4, "widths": [1, 4]}
MODELS = ("untied", "one-kv-head", "qwen3-moe")


def weights_of(model: Path) -> int:
    """Bytes of the checkpoint's files, in fp32."""
    return sum(each.stat().st_size for each in model.glob("*.safetensors"))


def test_halves_and_quarters_of_the_demo_model(tmp_path: Path) -> None:
    """Embeddings, which the output shares, are whole on all ranks; all else is one part."""
    halves = check_runs(tmp_path, "demo", MODEL, **HALVES, runs=("sp2tp2", "random-1"))
    quarters = check_runs(tmp_path, "demo", MODEL, **QUARTERS, runs=("tp",))
    print("bytes of weights: halves", halves, "quarters", quarters)
    assert quarters < 0.7 * halves


@pytest.mark.parametrize("name", MODELS)
def test_halves_of_other_models(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    held = check_runs(tmp_path, name, model, **HALVES, runs=("random-1",))
    total, embeddings = weights_of(model), 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    print(name, "bytes of weights", held, "of", total, "embeddings", embeddings)
    # Beside embeddings, norms and routers are on all ranks, and KV heads that ranks share.
    assert held < embeddings + 0.55 * (total - embeddings)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_halves_of_other_models_in_shares_alone(name: str, tmp_path: Path) -> None:
    check_runs(tmp_path, name, model_of(name, tmp_path), **HALVES, runs=("sp2tp2",))

"""Steps in sp, in tp, and alternating by chance compute what static vLLM computes, on one KV.

The reference is plain vLLM (tp 1) in a process of its own; fp32 must agree to 1e-4. KV heads
divide the width, equal it, or are fewer than it and replicated. Four ranks also compute two shares
of the tokens with two halves of the weights.
"""

from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3Config

from tests.harness.cells.servers import MODEL
from tests.harness.cells.step_ranks import run_steps
from tests.harness.vllm.references import (
    FP32_TOLERANCE,
    static,
)
from tests.harness.vllm.reshard_cases import draw_case
from tests.harness.vllm.step_checks import CHUNKS, MIXED, check_runs
from tests.harness.vllm.tiny_models import MOE, SIZES, make_model

pytestmark = [pytest.mark.slow, pytest.mark.exact]


@pytest.mark.timeout(900)
def test_steps_of_the_demo_model(tmp_path: Path) -> None:
    """Four KV heads: two for each of two ranks, one for each of four, who exchange in parts."""
    reference = static(tmp_path)
    check_runs(tmp_path, 2, reference, MODEL)
    check_runs(tmp_path, 4, reference, MODEL, **MIXED, exchange_parts=[1, 4])


@pytest.mark.timeout(600)
def test_steps_of_a_model_with_fewer_kv_heads_than_ranks(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    model = tmp_path / "one-kv-head"
    make_model(model, Qwen3Config(**sizes, head_dim=32, initializer_range=0.05))
    reference = static(tmp_path, model)
    # Trees of two ranks hold two copies of the head, those of four hold one.
    check_runs(tmp_path, 4, reference, model, **MIXED)


@pytest.mark.timeout(300)
def test_all_sampling_features_and_prefix_hits(tmp_path: Path) -> None:
    """The same tokens and log-probabilities in any mix, also on KV that another mode has cached."""
    cases = [draw_case(seed) for seed in range(1, 61)]
    assert any("regex" in case.params for case in cases)
    assert any("repetition_penalty" in case.params for case in cases)
    spec = {
        "model": str(MODEL),
        "ranks": 2,
        "engine_args": ["--dtype", "float32", "--max-model-len", "1024", *CHUNKS],
        "requests": [{"prompt": case.prompt, "params": case.params} for case in cases],
        "runs": ("tp", "sp", "random-3"),
        "keeps_cache": True,
    }
    results = run_steps(tmp_path, spec)
    for number, expected in enumerate(results["tp"]["streams"]):
        for run in ("sp", "random-3"):
            stream = results[run]["streams"][number]
            assert stream.tokens == expected.tokens, (run, cases[number])
            difference = np.abs(np.subtract(stream.logprobs, expected.logprobs))
            assert difference.max() < FP32_TOLERANCE, (run, cases[number])
    cached = {
        run: sum(stream.cached_tokens for stream in result["streams"])
        for run, result in results.items()
    }
    print("cached tokens hit:", cached, {run: each["modes"] for run, each in results.items()})
    # In the first run only shared starts are hit, then what the run before has left.
    assert cached["sp"] > 2 * cached["tp"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "ranks"), [("mixtral", 2), ("qwen3-moe", 4)])
def test_steps_of_models_with_experts(family: str, ranks: int, tmp_path: Path) -> None:
    """In tp a rank holds its range of experts, in sp all of them, mixed half of them.

    Four ranks share two KV heads.
    """
    model = tmp_path / family
    make_model(model, MOE[family])
    reference = static(tmp_path, model)
    check_runs(tmp_path, ranks, reference, model, **(MIXED if ranks == 4 else {}))

"""Steps in sp, in tp, and alternating by chance compute what static vLLM computes, on one KV.

The reference is plain vLLM (tp 1) in a process of its own; fp32 must agree to 1e-4. KV heads
divide the width, equal it, or are fewer than it and replicated. Four ranks also compute two shares
of the tokens with two halves of the weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import MixtralConfig, Qwen3Config, Qwen3MoeConfig

from tests.harness.cells.servers import MODEL
from tests.harness.cells.step_ranks import run_steps
from tests.harness.vllm.reshard_cases import draw_case
from tests.integration.test_families import SIZES, make_model
from tests.integration.test_numerics import (
    FP32_TOLERANCE,
    LOGITS_ARGS,
    NEW_TOKENS,
    largest_difference,
    prompts_and_text,
    static,
)

pytestmark = [pytest.mark.slow, pytest.mark.exact]

RUNS = ("tp", "sp", "random-1", "random-2")
MIXED: dict[str, Any] = {
    "widths": [1, 2, 4],
    "mixed": ["sp2tp2"],
    "runs": ("sp2tp2", *RUNS),
}
"""What is given for four ranks."""
CHUNKS = ["--max-num-batched-tokens", "256"]
"""Prefills go in chunks, and most steps mix them with decodes."""


def check_runs(
    folder: Path, ranks: int, reference: dict[str, Any], model: Path, **spec: Any
) -> int:
    """Do all runs and compare every logit and score of each with the reference.

    Returns the bytes of the leader's weights.
    """
    prompts, text = prompts_and_text()
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "params": {"max_tokens": NEW_TOKENS, "logprobs": -1}}
        for prompt in prompts
    ]
    requests.append({"prompt": text, "params": {"max_tokens": 1, "prompt_logprobs": 0}})
    given = {
        "model": str(model),
        "ranks": ranks,
        "engine_args": ["--dtype", "float32", *LOGITS_ARGS, *CHUNKS],
        "requests": requests,
        "runs": RUNS,
        **spec,
    }
    plain = {"tp", "sp"} if spec.get("parts", 1) == 1 else {"tp"}
    results = run_steps(folder, given)
    for run, result in results.items():
        *streams, scored = result["streams"]
        logits = largest_difference(streams, reference)
        scores = np.asarray(scored.prompt_logprobs.logprobs)[:, 0]
        worst = float(np.abs(scores - reference["scores_0"]).max())
        loss = abs(float(scores.mean() - reference["scores_0"].mean()))
        print(
            f"{model.name}, {ranks} ranks, {run}: logits {logits:.2e}, score {worst:.2e},"
            f" loss {loss:.2e}, steps {result['modes']}"
        )
        for number, stream in enumerate(streams):
            assert stream.tokens == reference[f"tokens_{number}"].tolist(), (run, number)
        assert logits < FP32_TOLERANCE, run
        assert worst < FP32_TOLERANCE, run
        wanted = {*plain, *spec.get("mixed", ())} if run.startswith("random") else {run}
        least = 5 if len(wanted) < 3 else 3
        assert {mode for mode, steps in result["modes"].items() if steps > least} == wanted, run
    return int(results[given["runs"][0]]["weights"])


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


MOE_SIZES: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 1024}
MOE = {
    "qwen3-moe": Qwen3MoeConfig(
        **MOE_SIZES,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        initializer_range=0.05,
    ),
    "mixtral": MixtralConfig(
        **MOE_SIZES, num_local_experts=8, num_experts_per_tok=2, initializer_range=0.05
    ),
}


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

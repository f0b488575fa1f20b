"""Steps in sp, in tp, and alternating by chance compute what static vLLM computes, on one KV.

The reference is plain vLLM (tp 1) in a process of its own; fp32 must agree to 1e-4. KV heads
divide the width, equal it, or are fewer than it and replicated.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.servers import MODEL
from tests.harness.static_process import run_static
from tests.harness.step_ranks import run_steps
from tests.integration.test_numerics import (
    FP32_TOLERANCE,
    LOGITS_ARGS,
    NEW_TOKENS,
    largest_difference,
    prompts_and_text,
)

pytestmark = pytest.mark.slow

RUNS = ("tp", "sp", "random-1", "random-2")
CHUNKS = ["--max-num-batched-tokens", "256"]
"""Prefills go in chunks, and most steps mix them with decodes."""


def static(folder: Path, prompts: list[list[int]], text: list[int]) -> dict[str, Any]:
    """What plain vLLM computes for the demo model in fp32."""
    spec = {
        "model": str(MODEL),
        "dtype": "float32",
        "tp": 1,
        "max_model_len": 1024,
        "max_tokens": NEW_TOKENS,
        "prompts": prompts,
        "texts": [text],
    }
    out = folder / "static.npz"
    run_static("tests.harness.static_vllm", spec, out)
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sp_tp_and_any_mix_of_their_steps_equal_static_vllm(ranks: int, tmp_path: Path) -> None:
    prompts, text = prompts_and_text()
    reference = static(tmp_path, prompts, text)
    requests = [
        {"prompt": prompt, "params": {"max_tokens": NEW_TOKENS, "logprobs": -1}}
        for prompt in prompts
    ]
    requests.append({"prompt": text, "params": {"max_tokens": 1, "prompt_logprobs": 0}})
    spec = {
        "model": str(MODEL),
        "ranks": ranks,
        "engine_args": ["--dtype", "float32", *LOGITS_ARGS, *CHUNKS],
        "requests": requests,
        "runs": RUNS,
    }
    for run, result in run_steps(tmp_path, spec).items():
        *streams, scored = result["streams"]
        logits = largest_difference(streams, reference)
        scores = np.asarray(scored.prompt_logprobs.logprobs)[:, 0]
        worst = float(np.abs(scores - reference["scores_0"]).max())
        loss = abs(float(scores.mean() - reference["scores_0"].mean()))
        print(
            f"{ranks} ranks, {run}: logits {logits:.2e}, score {worst:.2e}, loss {loss:.2e},"
            f" steps {result['modes']}"
        )
        for number, stream in enumerate(streams):
            assert stream.tokens == reference[f"tokens_{number}"].tolist(), (run, number)
        assert logits < FP32_TOLERANCE, run
        assert worst < FP32_TOLERANCE, run
        wanted = {"tp", "sp"} if run.startswith("random") else {run}
        assert {mode for mode, steps in result["modes"].items() if steps > 5} == wanted, run

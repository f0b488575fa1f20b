"""Runs of steps in chosen modes, compared with static vLLM step by step."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.cells.step_ranks import run_steps
from tests.harness.vllm.references import (
    FP32_TOLERANCE,
    LOGITS_ARGS,
    NEW_TOKENS,
    largest_difference,
    prompts_and_text,
)

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

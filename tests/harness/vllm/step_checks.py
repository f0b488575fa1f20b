"""Runs of steps in chosen modes, compared with static vLLM step by step."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.cells.step_ranks import has_sp, run_steps
from tests.harness.vllm.reference_files import reference
from tests.harness.vllm.references import FP32_TOLERANCE, LOGITS_ARGS, NEW_TOKENS

MIXED: dict[str, Any] = {"widths": [1, 2, 4], "mixed": ["sp2tp2"]}
"""What is given for four ranks."""
STEPS_MIN = 3
"""Of each mode in a random run, more."""
SINGLE_TOLERANCE = 2e-5
"""What a single logit or score may be off by where ranks borrow; tp 2 of plain vLLM: 1.3e-5."""
CHUNKS = ["--max-num-batched-tokens", "256"]
"""Prefills go in chunks, and most steps mix them with decodes."""


def check_runs(folder: Path, name: str, model: Path, plain: Path | None = None, **spec: Any) -> int:
    """Do all runs and compare every token, logit and score of each with the reference NAME.

    It is of the model, or of the `plain` one that has the weights which a quantized one means.

    Returns the bytes of the leader's weights.
    """
    expected = reference(name, plain or model)
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "params": {"max_tokens": NEW_TOKENS, "logprobs": -1}}
        for prompt in expected.prompts
    ]
    requests.append({"prompt": expected.text, "params": {"max_tokens": 1, "prompt_logprobs": 0}})
    given = {
        "model": str(model),
        "engine_args": ["--dtype", "float32", *LOGITS_ARGS, *CHUNKS],
        "requests": requests,
        **spec,
    }
    uniform = {"tp", "sp"} if has_sp(spec) else {"tp"}
    results = run_steps(folder, given)
    for run, result in results.items():
        *streams, scored = result["streams"]
        scores = np.asarray(scored.prompt_logprobs.logprobs)[:, 0]
        about = f"{name}, {spec['ranks']} ranks, {run}, steps {result['modes']}"
        worst = expected.check(streams, scores, FP32_TOLERANCE, about)
        if spec.get("borrow", "none") != "none":
            assert worst < SINGLE_TOLERANCE, about
        if spec.get("poison"):
            # At least one loan of each step of these, if the ring is of this kind at all.
            alone = sum(result["modes"].get(mode, 0) for mode in ("dp", "sp"))
            assert result["spoiled"] >= alone > 0, about
        wanted = {*uniform, *spec.get("mixed", ())} if run.startswith("random") else {run}
        used = {mode for mode, steps in result["modes"].items() if steps > STEPS_MIN}
        assert used == wanted, run
    return int(results[given["runs"][0]]["weights"])

"""Steps in sp, in tp, and alternating by chance compute what static vLLM computes, on one KV.

The reference is plain vLLM (tp 1), as the repository keeps it; fp32 must agree to 1e-4. KV heads
divide the width, equal it, or are fewer than it and replicated. Four ranks also compute two shares
of the tokens with two halves of the weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.servers import MODEL
from tests.harness.cells.step_ranks import run_steps
from tests.harness.vllm.references import FP32_TOLERANCE
from tests.harness.vllm.reshard_cases import draw_case
from tests.harness.vllm.step_checks import CHUNKS, MIXED, check_runs
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

LAST_CASE, LAST_CASE_LONG = 30, 60
"""Seeds of the random requests, of each day and of the long run: all of either, from 1."""
IN_PARTS: dict[str, Any] = {**MIXED, "exchange_parts": [1, 4]}
WHAT_IS_GIVEN: dict[tuple[str, int], dict[str, Any]] = {
    ("demo", 2): {},
    ("demo", 4): IN_PARTS,
    ("one-kv-head", 4): MIXED,
    ("mixtral", 2): {},
    ("qwen3-moe", 4): MIXED,
}
"""By model and ranks.

Four KV heads: two for each of two ranks, one for each of four, who exchange in parts. One KV head:
trees of two ranks hold two copies of it, those of four hold one. Models with experts, whose two KV
heads four ranks share: in tp a rank holds its range of experts, in sp all of them, mixed half.
"""


@pytest.mark.parametrize(
    ("name", "ranks", "runs"),
    [
        ("demo", 2, ("tp", "sp", "random-1")),
        ("demo", 4, ("sp2tp2", "random-1")),
        ("one-kv-head", 4, ("random-1",)),
        ("mixtral", 2, ("random-1",)),
        ("qwen3-moe", 4, ("random-1",)),
    ],
)
def test_steps(name: str, ranks: int, runs: tuple[str, ...], tmp_path: Path) -> None:
    """Every mode computes steps of a random run, each on KV that the others have written."""
    model, given = model_of(name, tmp_path), WHAT_IS_GIVEN[name, ranks]
    check_runs(tmp_path, name, model, ranks=ranks, runs=runs, **given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "runs"),
    [
        ("demo", 2, ("random-2",)),
        ("demo", 4, ("tp", "sp", "random-2")),
        ("one-kv-head", 4, ("sp2tp2", "tp", "sp", "random-2")),
        ("mixtral", 2, ("tp", "sp", "random-2")),
        ("qwen3-moe", 4, ("sp2tp2", "tp", "sp", "random-2")),
    ],
)
def test_more_steps(name: str, ranks: int, runs: tuple[str, ...], tmp_path: Path) -> None:
    """One mode for all steps of each of these models, and other random ones."""
    model, given = model_of(name, tmp_path), WHAT_IS_GIVEN[name, ranks]
    check_runs(tmp_path, name, model, ranks=ranks, runs=runs, **given)


@pytest.mark.parametrize("last", [LAST_CASE, pytest.param(LAST_CASE_LONG, marks=pytest.mark.long)])
def test_all_sampling_features_and_prefix_hits(last: int, tmp_path: Path) -> None:
    """The same tokens and log-probabilities in any mix, also on KV that another mode has cached."""
    cases = [draw_case(seed) for seed in range(1, last + 1)]
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

"""What plain vLLM makes of random greedy requests, each alone."""

import json
from pathlib import Path
from typing import Any

from tests.harness.cells.servers import MODEL
from tests.harness.vllm.reshard_cases import Case
from tests.harness.vllm.static_process import run_static


def static_answers(cases: list[Case], folder: Path) -> dict[int, Any]:
    """Its tokens for the greedy ones, and the log-probabilities (`scores`) of them, by seed."""
    greedy = [case for case in cases if case.is_greedy]
    spec = {
        "model": str(MODEL),
        "cases": [{"prompt": case.prompt, "params": case.params} for case in greedy],
    }
    out = folder / "static.json"
    run_static("tests.harness.vllm.static_cases", spec, out)
    answers = json.loads(out.read_text())
    return {case.seed: answer for case, answer in zip(greedy, answers, strict=True)}

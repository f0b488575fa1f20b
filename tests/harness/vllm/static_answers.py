"""What plain vLLM makes of random greedy requests, each alone."""

from pathlib import Path
from typing import Any

from tests.harness.cells.servers import MODEL
from tests.harness.vllm.reference_catalog import CATALOG, SEEDS
from tests.harness.vllm.reference_files import answers_of, load, packed, unpacked
from tests.harness.vllm.reshard_cases import Case


def static_answers(cases: list[Case], folder: Path) -> dict[int, Any]:
    """Its tokens for the greedy ones, and the log-probabilities (`scores`) of them, by seed.

    They are kept for the seeds of the suite, and computed for others that somebody asks for.
    """
    greedy = [case for case in cases if case.is_greedy]
    answers = unpacked(load(CATALOG["demo-cases"], MODEL))
    other = [case for case in greedy if case.seed >= SEEDS]
    if other:
        asked = [{"prompt": case.prompt, "params": case.params} for case in other]
        computed = answers_of({"model": str(MODEL), "cases": asked}, folder)
        answers |= unpacked(packed([case.seed for case in other], computed))
    return {case.seed: answers[case.seed] for case in greedy}

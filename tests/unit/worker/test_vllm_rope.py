"""The fused RoPE under Triton's interpreter, which must be chosen before triton's first import."""

import pytest

from tests.harness.vllm.interpreted import HARNESS, run_cases

pytest.importorskip("vllm")

CASES = HARNESS / "rope_cases.py"
FEWEST = 40
"""Cases that must have passed: an empty run proves nothing."""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_cases_pass_in_the_interpreter() -> None:
    run_cases(CASES, FEWEST)

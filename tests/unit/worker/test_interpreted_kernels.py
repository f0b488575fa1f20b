"""Triton's kernels under its interpreter: fused RoPE, silu, the fp8 GEMMs and the one that
drains.

The interpreter must be chosen before triton's first import, so all cases have one process of their
own.
"""

import pytest

from tests.harness.vllm.interpreted import LIMIT_S, run_cases

pytest.importorskip("vllm")

FEWEST = {
    "fp8_cases.py": 48,
    "rope_cases.py": 52,
    "silu_cases.py": 40,
    "drain_cases.py": 4,
    "block_cases.py": 9,
}
"""Cases that must have passed: an empty run proves nothing."""
FEWEST_LONG = {"fp8_cases.py": 35}


@pytest.mark.timeout(LIMIT_S + 20)
def test_cases_pass_in_the_interpreter() -> None:
    passed = run_cases(*FEWEST, marks="not long")
    assert all(passed[file] >= fewest for file, fewest in FEWEST.items()), passed


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 20)
def test_long_cases_pass_in_the_interpreter() -> None:
    passed = run_cases(*FEWEST_LONG, marks="long")
    assert all(passed[file] >= fewest for file, fewest in FEWEST_LONG.items()), passed

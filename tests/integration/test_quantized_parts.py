"""Quantized checkpoints are served where no rank views weights, and compute what they mean.

Each rank of a wide group holds a part, what vLLM's own rank holds in tp, and ranks that form none
hold all weights as vLLM does: packed 4-bit weights of AWQ and GPTQ with their
scales and zeros, and fp8 weights with a scale per block. The references are plain vLLM's (tp 1) of
the same weights in fp32; fp32 must agree to 2e-5.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.vllm.quantized_models import write_quantized
from tests.harness.vllm.step_checks import check_runs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PAIR: dict[str, Any] = {"ranks": 2, "parts": 2, "widths": [1, 2]}
QUARTERS: dict[str, Any] = {"ranks": 4, "parts": 4, "widths": [1, 4]}
CELLS: dict[str, dict[str, Any]] = {
    "single": {"ranks": 1, "parts": 1, "widths": [1], "runs": ("dp",)},
    "one-of-two": {"ranks": 2, "parts": 1, "widths": [1], "alone": 1, "runs": ("dp",)},
    "tp-alone": {**PAIR, "borrow": "none", "runs": ("tp",)},
    "pair": {**PAIR, "borrow": "all", "poison": True, "runs": ("sp", "random-1")},
    "alone-of-two": {**PAIR, "borrow": "all", "poison": True, "alone": 1, "runs": ("dp",)},
    "alone-of-four": {**QUARTERS, "borrow": "all", "poison": True, "alone": 2, "runs": ("dp",)},
    "quarters": {**QUARTERS, "borrow": "all", "runs": ("random-1",)},
}


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        ("awq", "single"),
        ("awq", "pair"),
        ("awq", "alone-of-four"),
        ("gptq", "tp-alone"),
        ("gptq", "quarters"),
        ("gptq", "alone-of-two"),
        ("gptq", "one-of-two"),
        ("fp8-block", "single"),
        ("fp8-block", "pair"),
        ("fp8-block", "alone-of-two"),
    ],
)
def test_steps(kind: str, cell: str, tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path, kind)
    check_runs(tmp_path, kind, quantized, plain, interpreted=True, **CELLS[cell])

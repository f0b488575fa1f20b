"""A rank that is killed finds its part of the weights in its cell's memory, and computes as before.

Two ranks with a half each: one computes alone with what it borrows, is killed with SIGKILL, and
another process takes its place.
"""

from pathlib import Path

import pytest

from tests.harness.cells.servers import MODEL
from tests.harness.cells.step_ranks import run_steps
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

PROMPTS = (list(range(5, 40)), list(range(100, 300)), [7, 8, 9])
CASES = [
    ("demo", "ffn", False),
    ("demo", "ffn", True),
    pytest.param("untied", "all", False, marks=pytest.mark.long),
    pytest.param("qwen3-moe", "ffn", False, marks=pytest.mark.long),
    pytest.param("qwen3-moe", "all", True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "borrow", "kills_lenders"), CASES)
def test_the_next_process_reads_no_weights(
    name: str, borrow: str, kills_lenders: bool, tmp_path: Path
) -> None:
    """The first test kills the rank alone; the second its lender as well, whose memory remains."""
    model = MODEL if name == "demo" else model_of(name, tmp_path)
    before, after = run_steps(
        tmp_path,
        {
            "model": str(model),
            "ranks": 2,
            "parts": 2,
            "borrow": borrow,
            "alone": 1,
            "again": True,
            "kills_lenders": kills_lenders,
            "runs": ["dp"],
            "engine_args": ["--dtype", "float32", "--max-model-len", "512"],
            "requests": [
                {"prompt": prompt, "params": {"max_tokens": 24, "logprobs": 2}}
                for prompt in PROMPTS
            ],
        },
    )
    assert before["dp"]["loaded"] > 0
    assert after["dp"]["loaded"] == 0
    assert after["dp"]["weights"] == before["dp"]["weights"]
    for first, second in zip(before["dp"]["streams"], after["dp"]["streams"], strict=True):
        assert len(first.tokens) == len(second.tokens) == 24
        assert second.tokens == first.tokens

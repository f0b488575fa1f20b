"""Ranks that borrow the parts of the weights that they lack compute what static vLLM computes.

Two ranks hold halves; of four, each holds a half, two of them the same one, or a quarter. A rank
computes in dp and its share of sp with all parts, of which it borrows the others' in every step;
where ranks take turns between sp, tp and mixed shapes, loans begin and end between other steps.
All models but the demo have an lm_head of their own; that of `untied` falls into uneven parts.
The references are plain vLLM's (tp 1), as the repository keeps them, and fp32 must agree to 2e-5.

The cases of each day have every model both with `ffn` and with `all`, every model once in dp and
once in steps that ranks share, and every kind of cell but the pair with both. Long runs have all
others.
"""

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.harness.vllm.step_checks import MIXED, check_runs
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

MODELS = ("demo", "untied", "qkv-bias", "one-kv-head", "qwen3-moe")
BORROW = ("ffn", "all")
HALVES_OF_TWO: dict[str, Any] = {"ranks": 2, "parts": 2, "widths": [1, 2]}
QUARTERS: dict[str, Any] = {"ranks": 4, "parts": 4, "widths": [1, 4]}
CELLS: dict[str, dict[str, Any]] = {
    "alone-of-two": {**HALVES_OF_TWO, "alone": 1, "runs": ("dp",)},
    "alone-of-four": {**QUARTERS, "alone": 2, "runs": ("dp",)},
    "pair": {**HALVES_OF_TWO, "runs": ("sp", "random-1")},
    "halves": {"ranks": 4, "parts": 2, **MIXED, "runs": ("random-1",)},
    "quarters": {**QUARTERS, "runs": ("random-1",)},
}
DAILY = {
    ("demo", "alone-of-two", "ffn"),
    ("qkv-bias", "alone-of-four", "all"),
    ("untied", "halves", "ffn"),
    ("untied", "halves", "all"),
    ("qkv-bias", "quarters", "ffn"),
    ("one-kv-head", "quarters", "all"),
    ("qwen3-moe", "pair", "all"),
}
DAILY_POISONED = {
    ("demo", "halves", "all"),
    ("untied", "alone-of-two", "all"),
    ("one-kv-head", "alone-of-four", "ffn"),
    ("qwen3-moe", "alone-of-two", "ffn"),
}


def cases(daily: Collection[tuple[str, str, str]]) -> list[Any]:
    """All cases, of which those of each day are not marked."""
    return [
        pytest.param(*case, marks=() if case in daily else (pytest.mark.long,))
        for case in itertools.product(MODELS, CELLS, BORROW)
    ]


@pytest.mark.parametrize(("name", "cell", "borrow"), cases(DAILY))
def test_steps(name: str, cell: str, borrow: str, tmp_path: Path) -> None:
    check_runs(tmp_path, name, model_of(name, tmp_path), borrow=borrow, **CELLS[cell])


@pytest.mark.parametrize(("name", "cell", "borrow"), cases(DAILY_POISONED))
def test_steps_where_slots_hold_nan_but_while_they_are_read(
    name: str, cell: str, borrow: str, tmp_path: Path
) -> None:
    model = model_of(name, tmp_path)
    check_runs(tmp_path, name, model, borrow=borrow, poison=True, **CELLS[cell])


@pytest.mark.parametrize(("cell", "borrow"), [("alone-of-two", "all"), ("quarters", "ffn")])
def test_layers_that_ranks_hold_whole_need_no_loans(cell: str, borrow: str, tmp_path: Path) -> None:
    model = model_of("demo", tmp_path)
    check_runs(tmp_path, "demo", model, borrow=borrow, poison=True, whole_layers=2, **CELLS[cell])


@pytest.mark.parametrize(
    ("name", "layers", "uneven"),
    [
        ("demo", 5, {"alone": 1, "runs": ("dp",), "poison": True}),
        ("qwen3-moe", 3, {"alone": 0, "runs": ("dp",)}),
        ("qwen3-moe", 3, {"runs": ("random-1",)}),
    ],
)
def test_a_source_holds_all_layers_and_a_sink_borrows_them(
    name: str, layers: int, uneven: dict[str, Any], tmp_path: Path
) -> None:
    """ZeroDP's uneven shares, of dense layers in odd number and of all matrices of experts."""
    spec = {**HALVES_OF_TWO, "whole_layers": [layers, 0], **uneven}
    check_runs(tmp_path, name, model_of(name, tmp_path), borrow="ffn", **spec)

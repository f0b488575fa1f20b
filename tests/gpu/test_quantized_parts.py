"""Quantized checkpoints over halves of the weights on two GPUs compute what static vLLM does.

Needs two NVIDIA GPUs and vLLM's CUDA build (4 bits: compute capability 7.5 or more; fp8: 8.9 or
more): `python -m pytest -m gpu tests/gpu/test_quantized_parts.py -s` prints what was measured.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.vllm.cuda_scores import ENGINE, moved_logits, score, scored, scores_of, text
from tests.harness.vllm.quantized_models import KINDS, write_quantized

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LAYOUTS = ("tp2", "dp2", "sp2", "shift2")
SWITCHES = 12
TOKENS = 200
ROUNDING = 0.05
"""What log-probabilities in bf16 may be off by, at least."""


@dataclass
class Served:
    """A checkpoint in a cell, and plain vLLM's scores of it by tp size."""

    kind: str
    static: dict[int, Any]
    cell: BareCell

    @property
    def limit(self) -> float:
        """How far scores may be from static tp 2, by what tp 1 and tp 2 differ by."""
        by_nature = float(np.abs(self.static[2] - self.static[1]).max())
        return max(2 * by_nature, ROUNDING)


def static_scores(folder: Path, model: Path) -> dict[int, Any]:
    """Plain vLLM's scores, by tp size."""
    return {tp: scores_of(folder, [text()], tp=tp, model=str(model))[0] for tp in (1, 2)}


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Started when plain vLLM has left the GPUs."""
    folder = tmp_path_factory.mktemp(request.param)
    model, _ = write_quantized(folder, request.param)
    static = static_scores(folder, model)
    with bare_cell(
        folder,
        ranks=2,
        model=model,
        engine_args=["--dtype", "bfloat16", *ENGINE],
        device="cuda",
        limits={"weight_parts": 2, "borrow": "all", "layout": "tp2"},
        pause_limit_ms=60_000,
    ) as up:
        yield Served(request.param, static, up)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_is_that_of_static_vllm(served: Served, layout: str) -> None:
    scores, wanted = asyncio.run(score(served.cell, layout)), served.static[2]
    error = float(np.abs(scores - wanted).max())
    line = f"{served.kind} {layout}: largest {error:.4f} of {served.limit:.4f}"
    print(line, f"loss {-scores.mean():.4f} static {-wanted.mean():.4f}")
    assert error <= served.limit, line
    assert abs(scores.mean() - wanted.mean()) < 0.02, line


def test_tasks_keep_their_kv_over_switches(served: Served) -> None:
    draw = random.Random(1)
    layouts = [draw.choice(LAYOUTS) for _ in range(SWITCHES)]
    moved = asyncio.run(moved_logits(served.cell, "dp2", layouts, TOKENS))
    given = asyncio.run(scored(served.cell, "tp2", [ids for ids, _ in moved]))
    errors = [
        float(np.abs(drawn - logits[-drawn.size :]).max())
        for (_, drawn), logits in zip(moved, given, strict=True)
    ]
    records = served.cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    print(served.kind, layouts, "largest logit errors", errors)
    assert sum(record["tasks"]["reshard"] for record in records) >= SWITCHES
    assert max(errors) <= max(4 * served.limit, 0.3)


def test_ranks_that_borrow_nothing_serve_in_tp(served: Served, tmp_path: Path) -> None:
    """Beside the cell of the other tests, whose ranks have taken their share of memory."""
    with bare_cell(
        tmp_path,
        ranks=2,
        model=Path(served.cell.config.model.path),
        engine_args=["--dtype", "bfloat16", *ENGINE],
        device="cuda",
        limits={"weight_parts": 2, "borrow": "none", "layout": "tp2"},
        pause_limit_ms=60_000,
    ) as alone:
        scores = asyncio.run(score(alone, "tp2"))
    error = float(np.abs(scores - served.static[2]).max())
    print(served.kind, "without loans: largest", error)
    assert error <= served.limit

"""Four ranks on GPUs: all kinds of groups compute what static vLLM does, tasks move between them.

Needs four NVIDIA GPUs, or fewer and NCCL 2.30, which lets ranks share them, and vLLM's CUDA build:
`python -m pytest -m gpu tests/gpu`. Mixed groups, and moves between groups of 1, 2 and 4 ranks, are
on GPUs nowhere else.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.vllm.cuda_scores import ENGINE, moved_logits, score, scored, static_scores

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

RANKS = 4
LAYOUTS = ("dp4", "tp4", "sp4", "shift4", "sp2tp2", "shift2tp2", "tp2+sp2", "dp2+shift2")
SWITCHES = 24
TOKENS = 400


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plain vLLM's scores on one GPU by number format."""
    folder = tmp_path_factory.mktemp("static")
    return {dtype: static_scores(folder, 1, dtype) for dtype in ("bfloat16", "float32")}


@pytest.fixture(scope="module")
def by_nature(static: dict[str, Any]) -> float:
    """How far scores in bf16 are from those in fp32."""
    return float(np.abs(static["bfloat16"] - static["float32"]).max())


def four_ranks(folder: Path, **cell: Any) -> AbstractContextManager[BareCell]:
    """Four ranks with the demo model in bf16."""
    return bare_cell(
        folder,
        ranks=RANKS,
        engine_args=[*ENGINE, *devices.engine_args(RANKS)],
        device="cuda",
        mixed=("sp2tp2",),
        limits={**devices.limits(RANKS), **cell},
        pause_limit_ms=60_000,
    )


@pytest.fixture(scope="module")
def cell(static: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Started when plain vLLM has left the GPUs."""
    with four_ranks(tmp_path_factory.mktemp("four")) as up:
        yield up


def check_loss(static: dict[str, Any], by_nature: float, cell: BareCell, layout: str) -> None:
    wanted = static["bfloat16"]
    scores = asyncio.run(score(cell, layout))
    error = np.abs(scores - wanted)
    print(layout, "loss", -scores.mean(), "static", -wanted.mean(), "largest", error.max())
    assert error.max() <= 1.5 * by_nature
    assert abs(scores.mean() - wanted.mean()) < 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_is_that_of_static_vllm(
    static: dict[str, Any], by_nature: float, cell: BareCell, layout: str
) -> None:
    check_loss(static, by_nature, cell, layout)


def test_tasks_that_move_between_all_kinds_of_groups_keep_their_kv(
    by_nature: float, cell: BareCell
) -> None:
    draw = random.Random(1)
    layouts = [draw.choice(LAYOUTS) for _ in range(SWITCHES)]
    moved = asyncio.run(moved_logits(cell, "dp4", layouts, TOKENS))
    given = asyncio.run(scored(cell, "dp4", [ids for ids, _ in moved]))
    errors = [
        float(np.abs(drawn - logits[-drawn.size :]).max())
        for (_, drawn), logits in zip(moved, given, strict=True)
    ]
    records = cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    carried = sum(record["tasks"]["reshard"] for record in records)
    print(layouts, "tasks moved", carried, "largest logit errors", errors, "by nature", by_nature)
    assert carried >= SWITCHES
    assert sum(record["tasks"]["recompute"] for record in records[:-2]) == 0
    assert max(errors) <= max(4 * by_nature, 0.3)


def test_ranks_with_halves_of_the_weights_compute_the_same(
    static: dict[str, Any], by_nature: float, tmp_path: Path
) -> None:
    """Beside the cell of the other tests, whose ranks have taken their share of memory."""
    with four_ranks(tmp_path, weight_parts=2, borrow="none", layout="shift2tp2") as halves:
        for layout in ("tp4", "sp2tp2", "shift2tp2"):
            check_loss(static, by_nature, halves, layout)
        ranks = halves.get("/admin/ranks")["ranks"]
    print([rank["memory"] for rank in ranks])

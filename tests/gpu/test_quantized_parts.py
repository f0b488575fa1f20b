"""Quantized checkpoints over halves of the weights on two ranks compute what static vLLM does.

Needs two NVIDIA GPUs, or one and NCCL 2.30, and vLLM's CUDA build (4 bits: compute capability 7.5
or more; fp8: 8.9 or more): `python -m pytest -m gpu tests/gpu/test_quantized_parts.py -s` prints
the errors.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import bare_cell
from tests.harness.vllm.cuda_checkpoint import (
    LAYOUTS,
    Served,
    check_loss,
    check_moves,
    serving,
)
from tests.harness.vllm.cuda_scores import ENGINE, score
from tests.harness.vllm.quantized_models import KINDS, write_quantized

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    model, _ = write_quantized(folder, request.param)
    limits = {"weight_parts": 2, "borrow": "all"}
    with serving(folder, request.param, model, limits=limits) as up:
        yield up


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_is_that_of_static_vllm(served: Served, layout: str) -> None:
    check_loss(served, layout)


def test_tasks_keep_their_kv_over_switches(served: Served) -> None:
    check_moves(served)


def test_ranks_that_borrow_nothing_serve_in_tp(served: Served, tmp_path: Path) -> None:
    """Beside the cell of the other tests, whose ranks have taken their share of memory."""
    with bare_cell(
        tmp_path,
        ranks=2,
        model=Path(served.cell.config.model.path),
        engine_args=["--dtype", "bfloat16", *ENGINE],
        device="cuda",
        limits={"weight_parts": 2, "borrow": "none", "layout": "tp2", **devices.limits(2)},
        pause_limit_ms=60_000,
    ) as alone:
        scores = asyncio.run(score(alone, "tp2"))
    error = float(np.abs(scores - served.static[2]).max())
    print(served.kind, "without loans: largest", error)
    assert error <= served.limit

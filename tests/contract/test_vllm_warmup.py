"""What keeps the warm steps of a CUDA rank's start from writing to blocks that it inherits."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.worker.gpu import warmup
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.eplb_utils import preserve_serving_state

from worker.engine.runners import gpu
from worker.engine.runners.gpu import GpuModeRunner

ROWS, BLOCKS = 4, 8


def tables() -> tuple[Any, list[list[int]]]:
    """vLLM's block tables without a device, and what is written to them."""
    written: list[list[int]] = []
    table = SimpleNamespace(
        gpu=torch.zeros(ROWS, BLOCKS), stage_write=lambda _row, _first, ids: written.append(ids)
    )
    made: Any = object.__new__(BlockTables)
    made.num_kv_cache_groups, made.fused_writer = 1, None
    made.block_tables = [table]
    made.num_blocks = SimpleNamespace(np=np.zeros((1, ROWS), dtype=np.int32))
    return made, written


def runner_of(block_tables: Any, **more: Any) -> Any:
    """As much of a runner as vLLM's guard of its state needs, without requests."""
    states = SimpleNamespace(req_id_to_index={})
    return SimpleNamespace(
        block_tables=block_tables, req_states=states, kv_block_zeroer=None, **more
    )


def test_blocks_of_requests_are_the_null_block_while_it_says_so() -> None:
    made, written = tables()
    with preserve_serving_state(runner_of(made)):
        made.append_block_ids(0, ([3, 4],), overwrite=True)
    made.append_block_ids(1, ([3, 4],), overwrite=True)
    assert written == [[0, 0], [3, 4]]


def test_the_warm_steps_run_while_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = SimpleNamespace(redirect_writes_to_null_block=False), []
    runner = runner_of(
        made,
        _trees=(),
        _first=None,
        use=lambda _: None,
        execute_model=lambda: None,
        intermediate_tensors=None,
        sample_tokens=None,
        pp_handler=None,
    )
    for name in ("lock_workspace", "warmup_kernels"):
        monkeypatch.setattr(gpu, name, lambda *_: seen.append(made.redirect_writes_to_null_block))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    GpuModeRunner.warm(runner)
    assert seen == [True, False]


def test_vllm_s_warm_steps_write_by_block_tables_alone() -> None:
    """They are steps of requests with blocks from 1 on, which the runner enters there."""
    source = inspect.getsource(warmup)
    assert "worker_execute_model" in source
    assert "null_blocks = block_tables is not None and (" in source, "fewer blocks are no obstacle"
    assert "redirect_writes_to_null_block" in source

"""The product's engine of one rank in the test's own process, over the demo model on CPU.

It is rank 0 of two. Nobody is rank 1, so in wide groups it rehearses, as a rank does that joins
serving ones: it computes with zeros in place of its peer's parts. Their tokens mean nothing, but
equal steps give equal ones.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.distributed import parallel_state

from comm_pool.layout import Rank
from comm_pool.pool import CommunicatorPool, activate
from coordinator.protocol.config import check_config
from tests.harness.cells.servers import MODEL
from worker.cohort import Cohort
from worker.engine import rank_engine
from worker.engine.config import replica_config
from worker.engine.rank_engine import RankEngine
from worker.memories import Memories, memory_of
from worker.spec import everyone, rank_spec

PAGES = 33
BUDGET = 96
"""Tokens of one step."""


class RehearsingPool(CommunicatorPool):
    """Communicators that compute alone for good."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "rehearses": True})

    def join(self) -> None:
        """Nobody is there to compute with."""


def _config(folder: Path) -> Any:
    engine_args = {
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-batched-tokens": BUDGET,
        "max-num-seqs": 8,
        "num-gpu-blocks-override": PAGES,
    }
    args = [word for name, value in engine_args.items() for word in (f"--{name}", str(value))]
    return check_config(
        {
            "model": {"path": str(MODEL), "served_name": "demo", "engine_args": args},
            "cell": {"ranks": 2, "device": "cpu", "layout": "dp2", "threads_per_rank": 1},
            "run_dir": str(folder),
        }
    )


@contextmanager
def real_engine(folder: Path) -> Iterator[RankEngine]:
    """Build the engine; the process is as before once the block is left."""
    threads, config = torch.get_num_threads(), _config(folder)
    base, memory = replica_config(config), memory_of(config)
    spec = rank_spec(config, Rank(0), Cohort(1, everyone(config), 0), Memories(memory))
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(rank_engine, "CommunicatorPool", RehearsingPool),
    ):
        engine = RankEngine(base, spec, lambda *_: None)
        try:
            yield engine
        finally:
            activate(engine.communicators.of_width(1))
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            torch.set_num_threads(threads)
            memory.close()

"""What the launcher does once, so that the ranks that it forks need not."""

import gc
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.triton_utils import dispatcher

from coordinator.protocol.config import check_config
from tests.bench.servers import MODEL
from worker import vllm_device
from worker.vllm_config import replica_config

THREADS = Path("/proc/self/task")


def test_a_launcher_prepares_what_all_ranks_need_and_can_still_fork() -> None:
    base = replica_config(
        check_config(
            {"model": {"path": str(MODEL)}, "cell": {"ranks": 1, "widths": [1], "layout": "dp1"}}
        )
    )
    threads, frozen = set(THREADS.iterdir()), gc.get_freeze_count()
    vllm_device._register_platform.cache_clear()
    try:
        vllm_device.prepare_launcher(base)
        assert dispatcher._registry, "vLLM's CPU kernels are registered"
        # A fork has the forking thread alone: what others held would be locked for ever. Threads
        # of earlier tests may end meanwhile.
        assert set(THREADS.iterdir()) <= threads
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    # A rank takes what is there.
    before = vllm_device._register_platform.cache_info().misses
    vllm_device.prepare_process(base, 0, 0)
    assert vllm_device._register_platform.cache_info().misses == before

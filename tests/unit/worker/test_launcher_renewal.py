"""Whom the launcher ends when a rank is lost, where memory is not shared: on CUDA."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from comm_pool.layout import Rank
from coordinator.protocol.config import check_config
from worker.launcher import Launcher
from worker.restarts import Cohort

LOST, OTHER = Rank(0), Rank(1)


def launcher(parts: int, other_pid: int) -> Launcher:
    """Two ranks that have served, started together."""
    cell = {"ranks": 2, "device": "cuda", "widths": [1, 2], "layout": "tp2", "weight_parts": parts}
    made: Any = Launcher(check_config({"model": {"path": "a-model"}, "cell": cell}))
    for rank in (LOST, OTHER):
        made._restarts.started(rank, Cohort(1, (LOST, OTHER), 0), 1)
        made._restarts.ready(rank, 0.0)
        made._ready[rank] = os.open(os.devnull, os.O_RDONLY)
    made._pids = {other_pid: OTHER}
    result: Launcher = made
    return result


@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_with_parts_of_the_weights_start_again_together(parts: int) -> None:
    """One that holds all of them serves on alone."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        made = launcher(parts, other.pid)
        assert not made._rank_ended(LOST, 1, -signal.SIGKILL)
        assert made._is_renewing is (parts > 1)
        if parts > 1:
            assert other.wait(10) == -signal.SIGTERM
        else:
            assert other.poll() is None
            assert made._restarts.next_due_s() is not None
    finally:
        other.kill()
        other.wait()

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
from worker.cohort import Cohort
from worker.launch.launcher import Launcher

LOST = Rank(0)


def launcher(parts: int, borrow: str, pids: dict[int, Rank]) -> Launcher:
    """Four ranks in pairs that have served, started together; these processes are still there."""
    cell = {"ranks": 4, "device": "cuda", "widths": [1, 2], "layout": "tp2+tp2"}
    config = {
        "model": {"path": "a-model"},
        "cell": cell | {"weight_parts": parts, "borrow": borrow},
    }
    made: Any = Launcher(check_config(config))
    ranks = tuple(map(Rank, range(4)))
    for rank in ranks:
        made._restarts.started(rank, Cohort(1, ranks, 0), 1)
        made._restarts.ready(rank, 0.0)
        for pipes in (made._ready, made._reasons):
            pipes[rank] = os.open(os.devnull, os.O_RDONLY)
    made._pids = pids
    result: Launcher = made
    return result


@pytest.mark.parametrize(("parts", "borrow"), [(1, "ffn"), (2, "none"), (2, "ffn")])
def test_a_rank_that_cannot_serve_without_a_lost_one_ends_and_the_others_serve_on(
    parts: int, borrow: str
) -> None:
    """One that holds all weights serves on alone; what others mapped of a process ends with it."""
    code = "import time; time.sleep(60)"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    try:
        made: Any = launcher(parts, borrow, {each.pid: Rank(n) for n, each in enumerate(others, 1)})
        assert not made._rank_ended(LOST, 1, -signal.SIGKILL)
        neighbour, *rest = others
        if parts > 1:
            assert neighbour.wait(10) == -signal.SIGKILL
            assert made._restarts.next_due_s() is None, "they start together"
            del made._pids[neighbour.pid]
            made._rank_ended(Rank(1), neighbour.pid, -signal.SIGKILL)
        assert made._restarts.next_due_s() is not None
        assert [each.poll() for each in rest] == [None, None]
        due = made._restarts.take_due(float("inf"))
        assert due == ([LOST, Rank(1)] if parts > 1 else [LOST])
    finally:
        for each in others:
            each.kill()
            each.wait()

"""A rank gets out of collectives that its peer never joins: custom all-reduce, graphs, NCCL's.

Needs two NVIDIA GPUs, or one and NCCL 2.30, which lets ranks share it, and vLLM's CUDA build.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.harness.cells.bare_cell import search_path
from tests.harness.cells.servers import ROOT, free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

STEPS = 4
LIMIT_S = 90


@contextmanager
def started(rank: int, port: int) -> Iterator[subprocess.Popen[str]]:
    """One of the two ranks; it is killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.harness.faults.way_out_rank", str(rank), str(port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search_path(), "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_gets_out_of_all_that_waits_for_its_peer() -> None:
    port = free_port()
    with ExitStack() as ends:
        ranks = [ends.enter_context(started(rank, port)) for rank in range(2)]
        out, errors = ranks[0].communicate(timeout=LIMIT_S)
    told = [json.loads(line) for line in out.splitlines() if line.startswith('{"what"')]
    print(*told, sep="\n")
    assert [each["ended"] for each in told] == [True] * STEPS, f"{told}\n{errors[-3000:]}"
    assert all(each["waits"] for each in told), told

"""The device time of a call, from a captured graph of many."""

from collections.abc import Callable
from typing import Any

import torch

CALLS = 20


def microseconds(run: Callable[[], Any]) -> float:
    """Device time of one call."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / CALLS

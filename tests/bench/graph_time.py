"""How long a captured graph takes on the device."""

import statistics
from collections.abc import Callable

import torch


def replay_us(run: Callable[[], object], calls: int, repeats: int) -> float:
    """Return the median microseconds of one of `calls` calls that `run` puts on the device."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(times))

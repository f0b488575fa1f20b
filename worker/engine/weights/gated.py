"""vLLM adapter: finds the fused layers whose stored order an activation can take as it is.

A gate_up stored shard-major needs no reorder where silu-and-mul follows: that is row-wise, so the
rows of n shards are n rows of one shard each, which is a free view. No name tells which module
works like this. Each candidate is computed in both ways, and the view stays where it changes
nothing.
"""

from collections.abc import Iterator

import torch
from torch import nn

from worker.engine.weights.layers import ShardMajorMerged, ViewedRow

TRIAL_TOKENS = 3
TRIAL_ERROR_MAX = 1e-2
"""Largest difference relative to the typical value; halves that are mixed up differ by 1."""


def view_gated(model: nn.Module) -> int:
    """Let fused layers of a loaded tree give their stored order where that changes nothing.

    Equal modules take one decision. It communicates nothing. Returns the number of such layers.
    """
    decided: dict[tuple[object, ...], bool] = {}
    viewed = 0
    for parent, fused, row in _candidates(model):
        kind = (type(parent), *(each.weight.shape for each in (fused, row)))
        if kind not in decided:
            decided[kind] = _is_row_wise(parent, fused, row)
        fused.row_wise = decided[kind]
        viewed += decided[kind]
    return viewed


def _candidates(model: nn.Module) -> Iterator[tuple[nn.Module, ShardMajorMerged, ViewedRow]]:
    """Yield each module in which one fused layer of two equal parts is beside one row-parallel."""
    for parent in model.modules():
        children = list(parent.children())
        fused = [each for each in children if isinstance(each, ShardMajorMerged)]
        rows = [each for each in children if isinstance(each, ViewedRow)]
        if len(fused) != 1 or len(rows) != 1 or fused[0].plan.held == 1 or fused[0].unviewed:
            continue
        sizes = fused[0].output_sizes
        if len(sizes) == 2 and sizes[0] == sizes[1] == rows[0].input_size:
            yield parent, fused[0], rows[0]


def _is_row_wise(parent: nn.Module, fused: ShardMajorMerged, row: ViewedRow) -> bool:
    """Compute the module with natural and with stored order, and compare."""
    draw = torch.Generator().manual_seed(TRIAL_TOKENS)
    x = torch.randn((TRIAL_TOKENS, fused.input_size), generator=draw)
    x = x.to(fused.weight.device, fused.params_dtype)
    reduces, row.reduce_results = row.reduce_results, False
    fused.row_wise = False
    try:
        with torch.no_grad():
            natural = _output(parent(x))
            fused.row_wise = True
            viewed = _output(parent(x))
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # It takes more than rows, so it is no feed-forward network.
    finally:
        fused.row_wise, row.reduce_results = False, reduces
    if natural.shape != viewed.shape:
        return False
    size = natural.float().norm().clamp_min(torch.finfo(torch.float32).tiny)
    return bool((viewed.float() - natural.float()).norm() / size <= TRIAL_ERROR_MAX)


def _output(out: object) -> torch.Tensor:
    first = out[0] if isinstance(out, tuple) else out
    if not isinstance(first, torch.Tensor):
        raise TypeError("no rows")
    return first

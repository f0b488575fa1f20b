"""Times the small kernels of a decode step, vLLM's, compiled ones and ours, on one NVIDIA GPU.

`python -m tests.bench.kernel_small [--hidden 4096 --inner 14336]` prints JSON: microseconds per
call in CUDA graphs, by rows, of vLLM's own kernel, of what torch.compile makes of the same
arithmetic, and of our kernel: as a tree calls it ("ours", vLLM's beyond `ROWS_MAX` rows), and with
each number of elements per thread. The differences times the layers are what `vllm serve` gains by
compilation.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch.nn import functional
from vllm import _custom_ops as ops

from tests.bench.graph_time import replay_us
from worker.engine.weights import silu_kernel
from worker.engine.weights.silu import silu_of_rows

ROWS = (1, 4, 16, 64, 128, 192, 256)
CALLS = 64
"""Calls in a graph, each of which needs the result of the one before, as in a step."""
REPEATS = 20
PER_THREAD = (1, 2, 4, 8)
"""Elements that a thread of our kernel computes."""
EPSILON = 1e-6
Kernel = Callable[[], None]


def captured_us(call: Kernel) -> float:
    """Median microseconds of one call, of `REPEATS` replays of a graph of `CALLS` calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return replay_us(graph.replay, CALLS, REPEATS)


def add_norm(rows: int, hidden: int) -> dict[str, Kernel]:
    """The norm of a sum, in place: what follows attention and feed-forward."""
    x, residual, weight = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, hidden), (rows, hidden), (hidden,))
    )

    def native(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.float() + residual.float()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON)
        return (total * scale).to(x.dtype) * weight, total.to(x.dtype)

    compiled = torch.compile(native, dynamic=False)

    def replace() -> None:
        normed, total = compiled(x, residual)
        x.copy_(normed)
        residual.copy_(total)

    def out_of_place() -> None:
        compiled(x, residual)

    return {
        "vllm": lambda: ops.fused_add_rms_norm(x, residual, weight, EPSILON),
        "compiled": out_of_place,
        "compiled, in place": replace,
    }


def silu_mul(rows: int, inner: int) -> dict[str, Kernel]:
    """The gate of a feed-forward."""
    both = torch.randn(rows, 2 * inner, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, inner, device="cuda", dtype=torch.bfloat16)

    def native(both: torch.Tensor) -> torch.Tensor:
        return functional.silu(both[..., :inner]) * both[..., inner:]

    compiled = torch.compile(native, dynamic=False)

    def run() -> None:
        compiled(both)

    def of_vllm(both: torch.Tensor) -> torch.Tensor:
        torch.ops._C.silu_and_mul(out, both)
        return out

    def ours() -> None:
        silu_of_rows(silu_kernel.silu_mul, of_vllm, both)

    def with_elements(per_thread: int) -> Kernel:
        def launch() -> None:
            silu_kernel.silu_mul(both, per_thread)

        return launch

    return {
        "vllm": lambda: torch.ops._C.silu_and_mul(out, both),
        "compiled": run,
        "ours": ours,
        **{f"ours, {count} per thread": with_elements(count) for count in PER_THREAD},
    }


def main() -> int:
    """Print what each kernel takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=4_096)
    parser.add_argument("--inner", type=int, default=14_336)
    options = parser.parse_args()
    found = {}
    for rows in ROWS:
        kernels = {
            "add + norm": add_norm(rows, options.hidden),
            "silu x gate": silu_mul(rows, options.inner),
        }
        found[rows] = {
            name: {which: round(captured_us(call), 2) for which, call in ways.items()}
            for name, ways in kernels.items()
        }
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

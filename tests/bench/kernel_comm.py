"""What NCCL's settings cost: memory of the communicators of all widths, and all-reduce times.

`python -m tests.bench.kernel_comm --ranks 4` forks one set of processes per setting, creates the
groups as a cell does (widths 2 and 4 of all ranks), and prints one JSON line per setting: MiB of
GPU memory after each group's first large all-reduce, and microseconds per all-reduce by MiB.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue as ResultQueue
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.cells.servers import free_port

SIZES_MIB = (1, 8, 32, 64, 128)
REPEATS = 20
JOIN_LIMIT_S = 90


@dataclass(frozen=True, slots=True)
class Setting:
    """Environment for NCCL; `eager` binds the world to its device, so that groups are split."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    eager: bool = False


SHARE = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "1"}
LL128_QUARTER = str(4915200 // 4)
SETTINGS = (
    Setting("default"),
    Setting("split", {}, eager=True),
    Setting("split, shared", SHARE, eager=True),
    Setting("ctas 16", {"NCCL_MAX_CTAS": "16"}),
    Setting("buffers 2 MiB", {"NCCL_BUFFSIZE": str(2 << 20)}),
    Setting("ll128 buffers of a quarter", {"NCCL_LL128_BUFFSIZE": LL128_QUARTER}),
    Setting("both", {"NCCL_BUFFSIZE": str(2 << 20), "NCCL_LL128_BUFFSIZE": LL128_QUARTER}),
)


def _used_mib() -> float:
    free, total = torch.cuda.mem_get_info()
    return float((total - free) / 2**20)


def _time_us(tensor: torch.Tensor, group: Any) -> float:
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    return float((time.perf_counter() - started) / REPEATS * 1e6)


def measure(
    rank: int, world: int, port: int, setting: Setting, sizes_mib: Sequence[int]
) -> dict[str, Any]:
    """Create the groups in this process and measure them; a collective call of all ranks."""
    os.environ.update(setting.environment)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tensors = {
        size: torch.zeros(size << 19, dtype=torch.bfloat16, device=device) for size in sizes_mib
    }
    before = _used_mib()
    started = time.perf_counter()
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        device_id=device if setting.eager else None,
    )
    result: dict[str, Any] = {"setting": setting.name, "world_mib": _used_mib() - before}
    width = 2
    while width <= world:
        before = _used_mib()
        own = None
        for first in range(0, world, width):
            ranks = list(range(first, first + width))
            group = dist.new_group(ranks, backend="nccl")
            own = group if rank in ranks else own
        times = {size: round(_time_us(tensors[size], own), 1) for size in sizes_mib}
        result[f"width_{width}"] = {"mib": round(_used_mib() - before, 1), "all_reduce_us": times}
        width *= 2
    result["seconds"] = round(time.perf_counter() - started, 2)
    dist.barrier()
    return result


def _child(
    rank: int,
    world: int,
    port: int,
    setting: Setting,
    sizes_mib: Sequence[int],
    results: "ResultQueue[dict[str, Any]]",
) -> None:
    result = measure(rank, world, port, setting, sizes_mib)
    if rank == 0:
        results.put(result)
        results.close()
        results.join_thread()
    os._exit(0)  # Tearing NCCL down takes longer than the measurement.


def main() -> None:
    """Measure every setting and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", choices=[each.name for each in SETTINGS], help="one setting")
    parser.add_argument("--sizes-mib", default=",".join(map(str, SIZES_MIB)))
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes_mib.split(",")]
    context = multiprocessing.get_context("fork")
    for setting in (each for each in SETTINGS if options.only in (None, each.name)):
        results: ResultQueue[dict[str, Any]] = context.Queue()
        port = free_port()
        children = [
            context.Process(
                target=_child, args=(rank, options.ranks, port, setting, sizes, results)
            )
            for rank in range(options.ranks)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(JOIN_LIMIT_S)
            if child.is_alive():
                child.kill()
        failed = {"setting": setting.name, "failed": [child.exitcode for child in children]}
        done = all(child.exitcode == 0 for child in children)
        print(json.dumps(results.get(timeout=5) if done else failed), flush=True)


if __name__ == "__main__":
    main()

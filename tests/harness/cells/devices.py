"""How many ranks share a device where a test wants more of them than the machine has GPUs."""

from collections.abc import Sequence

import pytest
import torch

from coordinator.protocol.nccl import can_share, nccl_version

BOTH = (
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.chaos),
)
"""Where a test of GPUs runs: on CPU by `make chaos`, which shows that it can be trusted."""
KV_BYTES = 512 << 20
CUDA_ENGINE = (
    *("--max-model-len", "1024", "--max-num-seqs", "64"),
    *("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(4 << 30)),
)
"""Options of a rank that has a GPU. The memory for KV is given, so that nothing is measured while
other tests take and free memory of the same GPUs."""
CPU_ENGINE = ("--dtype", "float32", "--max-model-len", "1024")


def ranks_per_device(ranks: int) -> int:
    """1 where each rank can have a device of its own, and on machines without any.

    The test is skipped where ranks would have to share a device and NCCL cannot.
    """
    found: int = torch.cuda.device_count()
    shared = -(-ranks // found) if found else 1
    if shared > 1 and not can_share(nccl := nccl_version() or "0"):
        pytest.skip(f"{ranks} ranks need as many GPUs, or NCCL 2.30 to share {found}; not {nccl}")
    return shared


def limits(ranks: int) -> dict[str, int]:
    """What the configuration's `cell` says of it."""
    return {"ranks_per_device": ranks_per_device(ranks)}


def engine_args(ranks: int) -> list[str]:
    """How much memory a rank takes for KV where it cannot measure what is left."""
    return ["--kv-cache-memory-bytes", str(KV_BYTES)] if ranks_per_device(ranks) > 1 else []


def cell_on(
    device: str, ranks: int, cuda_engine: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """Return the engine's options and the `cell` limits of what runs on GPUs and on CPU alike."""
    if device == "cuda":
        return [*cuda_engine, *engine_args(ranks)], limits(ranks)
    return list(CPU_ENGINE), {}

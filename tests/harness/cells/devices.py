"""How many ranks share a device where a test wants more of them than the machine has GPUs."""

from collections.abc import Sequence

import pytest
import torch

BOTH = (
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.chaos),
)
"""Where a test of GPUs runs: on CPU by `make chaos`, which shows that it can be trusted."""
KV_BYTES = 512 << 20
CPU_ENGINE = ("--dtype", "float32", "--max-model-len", "1024")


def ranks_per_device(ranks: int) -> int:
    """1 where each rank can have a device of its own, and on machines without any."""
    found: int = torch.cuda.device_count()
    return -(-ranks // found) if found else 1


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

"""What every tiling of the fp8 GEMM must keep to."""

from worker.engine.weights.fp8_kernel import Tiling

SHARED_BYTES = 227 * 1024
"""What a program may have of a Hopper SM's shared memory."""


def check_tiling(tiling: Tiling, bucket: int, outputs: int, inputs: int) -> None:
    where = (bucket, outputs, inputs, tiling)
    for size in (tiling.block_m, tiling.block_n, tiling.block_k):
        assert size >= 16 and size & (size - 1) == 0, where
    assert tiling.block_m <= bucket, where
    assert tiling.warps in (4, 8), where
    assert tiling.fits(bucket, outputs), where
    loads = tiling.stages * (tiling.block_m + tiling.block_n) * tiling.block_k
    assert loads <= SHARED_BYTES - 1024, where
    # No part is empty: it would cost a join and no step.
    steps = -(-inputs // tiling.block_k)
    part = -(-steps // tiling.split)
    assert (tiling.split - 1) * part < steps, where

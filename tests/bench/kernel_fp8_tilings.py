"""What the fp8 benchmark tries: shapes of models, and tilings of their weights.

`python -m tests.bench.kernel_fp8 --dry-run` counts them.
"""

from collections.abc import Iterator
from dataclasses import replace

from worker.engine.weights.fp8_kernel import BUCKETS, STEPS_PER_PART, Tiling, default_tiling

SHAPES = {
    "70b-tp4-o": (8192, 2048, 8192),
    "70b-tp4-down": (8192, 7168, 28672),
    "70b-tp2-o": (8192, 4096, 8192),
    "70b-tp2-down": (8192, 14336, 28672),
    "32b-tp4-o": (5120, 2048, 8192),
    "32b-tp4-down": (5120, 6400, 25600),
    "32b-tp2-o": (5120, 4096, 8192),
    "32b-tp2-down": (5120, 12800, 25600),
    "8b-tp4-o": (4096, 1024, 4096),
    "8b-tp4-down": (4096, 3584, 14336),
    "8b-tp2-o": (4096, 2048, 4096),
    "8b-tp2-down": (4096, 7168, 14336),
}
"""Outputs, inputs of one rank, inputs of the whole weight: Llama 3 70B, Qwen3 32B, Llama 3 8B."""
BLOCKS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 256, 5, 4), (64, 256, 8, 4), (64, 512, 4, 4), (64, 128, 10, 4), (128, 256, 5, 8)),
    32: ((64, 256, 5, 4), (64, 256, 8, 4), (64, 512, 4, 4), (64, 128, 8, 4), (128, 256, 5, 8)),
    64: ((64, 128, 6, 4), (64, 256, 5, 4), (128, 128, 5, 8), (128, 128, 8, 8), (128, 256, 4, 8)),
    128: ((64, 128, 6, 4), (64, 256, 4, 4), (128, 128, 4, 8), (128, 128, 6, 8), (128, 256, 3, 8)),
    256: ((64, 128, 5, 8), (128, 128, 4, 8)),
}
"""By tokens of a tile: rows, step through K, stages, warps. In each list the likelier first."""
IN_BLOCKS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 128, 10, 4), (64, 128, 16, 4), (64, 128, 6, 4), (128, 128, 8, 8), (128, 128, 8, 4)),
    32: ((64, 128, 10, 4), (64, 128, 14, 4), (64, 128, 6, 4), (128, 128, 8, 8), (128, 128, 8, 4)),
    64: ((64, 128, 6, 4), (64, 128, 10, 4), (128, 128, 5, 8), (128, 128, 8, 8), (128, 128, 6, 4)),
    128: ((64, 128, 6, 4), (64, 128, 8, 8), (128, 128, 4, 8), (128, 128, 6, 8)),
    256: ((64, 128, 4, 8), (64, 128, 5, 8), (128, 128, 4, 8)),
}
"""The same where W has a scale per block: a step is a block wide."""
COPIED_BLOCKS = 2
"""So many of each list are also tried with cp.async instead of the bulk copy engine."""
SHARED_BYTES = 226 * 1024
SMS = 132


def tilings(bucket: int, outputs: int, inputs: int, *, in_blocks: bool = False) -> Iterator[Tiling]:
    """What to try for a bucket and a weight (N, K), without repetition; the default first."""
    first = default_tiling(bucket, outputs, inputs, in_blocks=in_blocks)
    yield first
    block_ms = [bucket] if bucket < BUCKETS[-1] else [128, 256]
    for block_m in block_ms:
        tried = (IN_BLOCKS if in_blocks else BLOCKS)[block_m]
        for number, (block_n, block_k, stages, warps) in enumerate(tried):
            base = Tiling(block_m, block_n, block_k, 1, stages, warps, True)
            if stages * (block_m + block_n) * block_k > SHARED_BYTES:
                continue
            tiles = -(-bucket // block_m) * -(-outputs // block_n)
            steps = -(-inputs // block_k)
            wanted = {1, *(max(1, round(waves * SMS / tiles)) for waves in (1, 2))}
            for split in sorted(wanted):
                each = replace(base, split=split)
                part = -(-steps // split)
                if split > 1 and (part < STEPS_PER_PART or (split - 1) * part >= steps):
                    continue
                for bulk in (True, False) if number < COPIED_BLOCKS else (True,):
                    if (found := replace(each, bulk=bulk)) != first and found.fits(bucket, outputs):
                        yield found


def to_compile(names: list[str], *, in_blocks: bool = False) -> list[Tiling]:
    """One tiling per kernel that a sweep compiles: the number of parts is no part of a kernel."""
    found: dict[tuple[Tiling, bool], None] = {}
    for name in names:
        outputs, inputs, _ = SHAPES[name]
        for bucket in BUCKETS:
            for each in tilings(bucket, outputs, inputs, in_blocks=in_blocks):
                even = each.bulk or inputs % each.block_k == 0
                found.setdefault((replace(each, split=min(each.split, 2)), even), None)
    return [tiling for tiling, even in found if even]

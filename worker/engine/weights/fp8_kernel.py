"""vLLM adapter: the fp8 GEMM of few tokens whose weight is a column range of a wider matrix.

Up to 256 tokens, reading the weight dominates a GEMM. `few_tokens_mm` reads the rows of W (N, K) in
place, with any row stride, for all tokens at once. It applies both scales and the bias to the fp32
sums and rounds once, in the order of vLLM's CUTLASS epilogue, with fast accumulation like CUTLASS.
Scales of blocks apply to the sums of each step through K, which is one block wide.
A token's bits depend on the number of tokens (`BUCKETS`), not on the other tokens.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BUCKETS = (16, 32, 64, 128, 256)
"""Token counts up to which one tiling, and one compiled kernel, serves a weight."""

TOKENS_MAX = BUCKETS[-1]

PROGRAMS_WANTED = 128
"""Programs that keep an H100 or H200 (132 SMs) streaming; with fewer, K is split."""

SPLIT_MAX = 8

STEPS_PER_PART = 4
"""Minimum steps through K per part, so that its loads overlap with something."""

BLOCK_K = 128
"""Columns of a block of W, and tokens' elements, with one scale: a step where scales are so."""

PARTIAL_ELEMENTS = 4 << 20
"""Number of fp32 sums that a workspace holds (16 MiB): 256 tokens, 8192 outputs, K in two."""

ARRIVAL_COUNTERS = 4096
"""Maximum tiles whose programs a workspace can count."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one GEMM is cut, and how Triton compiles a program.

    Args:
        block_m: tokens of a tile; a power of two of at least 16.
        block_n: rows of W in a tile; 64 per warpgroup use wgmma.
        block_k: elements (bytes) of a row that one step multiplies.
        split: parts that K is cut into.
        stages: steps that are loaded ahead, plus one.
        warps: of a program.
        bulk: whether tiles are loaded by the bulk tensor copy engine (TMA) instead of cp.async.
        early: whether the launch overlaps with the end of the kernel before (programmatic dependent
            launch).
    """

    block_m: int
    block_n: int
    block_k: int
    split: int
    stages: int
    warps: int
    bulk: bool
    early: bool = False

    def programs(self, tokens: int, outputs: int) -> tuple[int, int, int]:
        """Return the grid: tiles of tokens, tiles of outputs, parts of K."""
        return (triton.cdiv(tokens, self.block_m), triton.cdiv(outputs, self.block_n), self.split)

    def fits(self, tokens: int, outputs: int) -> bool:
        """Return whether a workspace can hold the sums of all parts."""
        tiles = triton.cdiv(tokens, self.block_m) * triton.cdiv(outputs, self.block_n)
        elements = tiles * self.split * self.block_m * self.block_n
        return self.split == 1 or (elements <= PARTIAL_ELEMENTS and tiles <= ARRIVAL_COUNTERS)


TUNED: dict[tuple[int, int, int], Tiling] = {
    (16, 8192, 2048): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 8192, 2048): Tiling(32, 64, 256, 1, 5, 4, False, False),
    (64, 8192, 2048): Tiling(64, 64, 256, 1, 5, 4, False, False),
    (128, 8192, 2048): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 8192, 2048): Tiling(256, 64, 128, 1, 5, 8, True, False),
    (16, 8192, 7168): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 8192, 7168): Tiling(32, 64, 512, 1, 4, 4, True, False),
    (64, 8192, 7168): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 8192, 7168): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 8192, 7168): Tiling(128, 128, 128, 1, 6, 8, True, False),
    (16, 8192, 4096): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 8192, 4096): Tiling(32, 64, 512, 1, 4, 4, True, False),
    (64, 8192, 4096): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 8192, 4096): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 8192, 4096): Tiling(128, 128, 128, 1, 6, 8, True, False),
    (16, 8192, 14336): Tiling(16, 64, 512, 1, 4, 4, True, False),
    (32, 8192, 14336): Tiling(32, 64, 512, 1, 4, 4, True, False),
    (64, 8192, 14336): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 8192, 14336): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 8192, 14336): Tiling(128, 128, 128, 1, 6, 8, True, False),
    (16, 5120, 2048): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 5120, 2048): Tiling(32, 64, 256, 1, 5, 4, False, False),
    (64, 5120, 2048): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 5120, 2048): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 5120, 2048): Tiling(256, 64, 128, 1, 5, 8, True, False),
    (16, 5120, 6400): Tiling(16, 64, 512, 1, 4, 4, True, False),
    (32, 5120, 6400): Tiling(32, 64, 256, 1, 5, 4, False, False),
    (64, 5120, 6400): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 5120, 6400): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 5120, 6400): Tiling(256, 64, 128, 1, 5, 8, True, False),
    (16, 5120, 4096): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 5120, 4096): Tiling(32, 64, 512, 1, 4, 4, True, False),
    (64, 5120, 4096): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 5120, 4096): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 5120, 4096): Tiling(256, 64, 128, 1, 5, 8, True, False),
    (16, 5120, 12800): Tiling(16, 64, 256, 1, 8, 4, False, False),
    (32, 5120, 12800): Tiling(32, 64, 256, 1, 8, 4, True, False),
    (64, 5120, 12800): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 5120, 12800): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 5120, 12800): Tiling(128, 128, 128, 1, 6, 8, True, False),
    (16, 4096, 1024): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 4096, 1024): Tiling(32, 64, 256, 1, 5, 4, False, False),
    (64, 4096, 1024): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 4096, 1024): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 4096, 1024): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (16, 4096, 3584): Tiling(16, 64, 512, 1, 4, 4, True, False),
    (32, 4096, 3584): Tiling(32, 64, 512, 1, 4, 4, True, False),
    (64, 4096, 3584): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 4096, 3584): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 4096, 3584): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (16, 4096, 2048): Tiling(16, 64, 256, 1, 5, 4, False, False),
    (32, 4096, 2048): Tiling(32, 64, 256, 1, 5, 4, False, False),
    (64, 4096, 2048): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 4096, 2048): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 4096, 2048): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (16, 4096, 7168): Tiling(16, 64, 512, 1, 4, 4, True, False),
    (32, 4096, 7168): Tiling(32, 64, 512, 1, 4, 4, True, False),
    (64, 4096, 7168): Tiling(64, 64, 256, 1, 5, 4, True, False),
    (128, 4096, 7168): Tiling(128, 64, 256, 1, 4, 4, True, False),
    (256, 4096, 7168): Tiling(128, 64, 256, 1, 4, 4, True, False),
}
"""(bucket, N, K) -> the fastest tiling that `python -m tests.bench.kernel_fp8` found on an H200."""

TUNED_IN_BLOCKS: dict[tuple[int, int, int], Tiling] = {
    (16, 5120, 4096): Tiling(16, 64, 128, 3, 6, 4, True, True),
    (32, 5120, 4096): Tiling(32, 64, 128, 3, 6, 4, True, True),
    (64, 5120, 4096): Tiling(64, 128, 128, 3, 6, 4, True, True),
    (128, 5120, 4096): Tiling(128, 64, 128, 1, 6, 4, True, True),
    (256, 5120, 4096): Tiling(256, 64, 128, 1, 5, 8, True, True),
    (16, 5120, 12800): Tiling(16, 64, 128, 3, 6, 4, True, True),
    (32, 5120, 12800): Tiling(32, 64, 128, 3, 6, 4, True, True),
    (64, 5120, 12800): Tiling(64, 64, 128, 3, 6, 4, True, True),
    (128, 5120, 12800): Tiling(128, 128, 128, 3, 4, 8, True, True),
    (256, 5120, 12800): Tiling(256, 64, 128, 3, 5, 8, True, True),
    (16, 4096, 2048): Tiling(16, 64, 128, 4, 6, 4, True, True),
    (32, 4096, 2048): Tiling(32, 64, 128, 2, 6, 4, True, True),
    (64, 4096, 2048): Tiling(64, 64, 128, 2, 6, 4, True, True),
    (128, 4096, 2048): Tiling(128, 64, 128, 2, 6, 4, True, True),
    (256, 4096, 2048): Tiling(128, 64, 128, 1, 6, 4, True, True),
    (16, 4096, 7168): Tiling(16, 64, 128, 4, 6, 4, True, True),
    (32, 4096, 7168): Tiling(32, 64, 128, 4, 6, 4, True, True),
    (64, 4096, 7168): Tiling(64, 64, 128, 4, 6, 4, True, True),
    (128, 4096, 7168): Tiling(128, 64, 128, 2, 6, 4, True, True),
    (256, 4096, 7168): Tiling(256, 64, 128, 2, 5, 8, True, True),
    (16, 8192, 4096): Tiling(16, 64, 128, 1, 6, 4, True, True),
    (32, 8192, 4096): Tiling(32, 64, 128, 2, 6, 4, True, True),
    (64, 8192, 4096): Tiling(64, 64, 128, 2, 6, 4, True, True),
    (128, 8192, 4096): Tiling(128, 64, 128, 1, 6, 4, True, True),
    (256, 8192, 4096): Tiling(256, 64, 128, 1, 5, 8, True, True),
    (16, 8192, 14336): Tiling(16, 64, 128, 2, 6, 4, True, False),
    (32, 8192, 14336): Tiling(32, 64, 128, 2, 6, 4, True, True),
    (64, 8192, 14336): Tiling(64, 64, 128, 2, 6, 4, True, False),
    (128, 8192, 14336): Tiling(128, 128, 128, 2, 4, 8, True, False),
    (256, 8192, 14336): Tiling(256, 64, 128, 1, 5, 8, True, False),
}
"""The same where W has a scale per block: `python -m tests.bench.kernel_fp8 --in-blocks`."""


def bucket_of(tokens: int) -> int:
    """Return the bucket of 1 to `TOKENS_MAX` tokens."""
    return next(each for each in BUCKETS if tokens <= each)


@lru_cache(maxsize=1024)
def tiling_for(tokens: int, outputs: int, inputs: int, *, in_blocks: bool = False) -> Tiling:
    """Return the tuned tiling of a weight (N, K) = (outputs, inputs), or the default one."""
    bucket = bucket_of(tokens)
    tuned = (TUNED_IN_BLOCKS if in_blocks else TUNED).get((bucket, outputs, inputs))
    return tuned or default_tiling(bucket, outputs, inputs, in_blocks=in_blocks)


def default_tiling(bucket: int, outputs: int, inputs: int, *, in_blocks: bool = False) -> Tiling:
    """Return a tiling for untuned shapes.

    Up to 64 tokens a program takes 64 rows of W, the minimum of wgmma. Beyond, reading the tokens
    again for every 64 rows would cost as much as the rows, so a program takes 128, and two
    warpgroups hold its sums. About 100 KiB of loads are in flight in each. K is split if there
    would be less than two thirds of the wanted programs, but not into parts of less than
    `STEPS_PER_PART` steps, nor beyond the workspace.
    """
    if bucket <= 32:
        step, stages = (BLOCK_K, 10) if in_blocks else (256, 5)
        shape = Tiling(bucket, 64, step, 1, stages, 4, True)
    elif bucket == 64:
        shape = Tiling(bucket, 64, 128, 1, 6, 4, True)
    else:
        shape = Tiling(128, 128, 128, 1, 4, 8, True)
    tiles = triton.cdiv(bucket, shape.block_m) * triton.cdiv(outputs, shape.block_n)
    steps = triton.cdiv(inputs, shape.block_k)
    split = max(1, min(round(PROGRAMS_WANTED / tiles), steps // STEPS_PER_PART, SPLIT_MAX))
    split = triton.cdiv(steps, triton.cdiv(steps, split))  # No part is left without steps.
    while not replace(shape, split=split).fits(bucket, outputs):
        split -= 1
    return replace(shape, split=split)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory in which the parts of a split GEMM meet; its launches share one stream.

    Args:
        partials: fp32, (elements,), the sums of parts; never read before they are written.
        arrivals: int32, (counters,), zero between launches.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor


@lru_cache(maxsize=16)
def workspace_of(device: torch.device) -> Workspace:
    """Return the workspace of all GEMMs of this process on a device, made by the first call.

    Make it before CUDA graphs are captured: they keep its address.
    """
    return Workspace(
        torch.empty(PARTIAL_ELEMENTS, dtype=torch.float32, device=device),
        torch.zeros(ARRIVAL_COUNTERS, dtype=torch.int32, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    a,
    w,
    scale_a,
    scale_w,
    n,
    m,
    tokens,
    outputs,
    inputs,
    a_row,
    w_row,
    scale_a_step,
    scale_w_step,
    scale_a_column,
    scale_w_column,
    part,
    split,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    even: tl.constexpr,
    bulk: tl.constexpr,
    scale_rows: tl.constexpr,
):
    """Return fp32 (block_n, block_m): rows `n` of W times tokens `m`, over a part of K's steps."""
    steps = tl.cdiv(inputs, block_k)
    share = tl.cdiv(steps, split)
    k = tl.arange(0, block_k)
    total = tl.zeros((block_n, block_m), dtype=tl.float32)
    for step in range(part * share, tl.minimum(steps, (part + 1) * share)):
        first_k = step * block_k
        if bulk:  # The copy engine fills what lies outside with zeros.
            rows = w.load([tl.program_id(1) * block_n, first_k])
            activations = a.load([tl.program_id(0) * block_m, first_k])
        else:
            # Rows past the last repeat it and are never stored.
            row = tl.minimum(n, outputs - 1).to(tl.int64)
            row_at = w + row[:, None] * w_row + (first_k + k)[None, :]
            activations_at = a + m.to(tl.int64)[:, None] * a_row + (first_k + k)[None, :]
            if even:
                rows = tl.load(row_at)
                activations = tl.load(activations_at, mask=(m < tokens)[:, None], other=0.0)
            else:
                inside = (first_k + k < inputs)[None, :]
                rows = tl.load(row_at, mask=inside, other=0.0)
                activations = tl.load(
                    activations_at, mask=(m < tokens)[:, None] & inside, other=0.0
                )
        if scale_rows:
            row_scale_at = scale_w + (tl.minimum(n, outputs - 1) // scale_rows) * scale_w_step
            by_row = tl.load(row_scale_at + step * scale_w_column)
            token_scale_at = scale_a + m * scale_a_step + step * scale_a_column
            by_token = tl.load(token_scale_at, mask=m < tokens, other=0.0)
            total += tl.dot(rows, activations.T) * by_row[:, None] * by_token[None, :]
        else:
            total = tl.dot(rows, activations.T, total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _store_scaled(  # type: ignore[no-untyped-def]
    total,
    by_row,
    by_token,
    shift,
    n,
    m,
    out,
    tokens,
    outputs,
    has_bias: tl.constexpr,
):
    """Scale the sums (block_n, block_m) of rows `n` and tokens `m`; round and store them."""
    total = total * by_row[:, None] * by_token[None, :]
    if has_bias:
        total += shift[:, None]
    at = out + m.to(tl.int64)[None, :] * outputs + n[:, None]
    mask = (n < outputs)[:, None] & (m < tokens)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


# New token counts or scale addresses must not compile another kernel while serving.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("tokens", "scale_a_step", "scale_w_step", "scale_a_column", "scale_w_column", "split")
    ],
    do_not_specialize_on_alignment=["scale_a", "scale_w", "bias"],
)
def _few_tokens(  # type: ignore[no-untyped-def]
    a,
    w,
    scale_a,
    scale_w,
    bias,
    out,
    partials,
    arrivals,
    tokens,
    outputs,
    inputs,
    a_row,
    w_row,
    scale_a_step,
    scale_w_step,
    scale_a_column,
    scale_w_column,
    split,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_split: tl.constexpr,
    has_bias: tl.constexpr,
    even: tl.constexpr,
    bulk: tl.constexpr,
    early: tl.constexpr,
    scale_rows: tl.constexpr,
):
    # Tiles of tokens are neighbours in the grid, so that they find W's rows in the cache.
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    part = tl.program_id(2)
    by_row = tl.full((block_n,), 1.0, tl.float32)
    by_token = tl.full((block_m,), 1.0, tl.float32)
    if not scale_rows:
        # Loaded here, so that no program waits for them after the last step.
        by_row = tl.load(scale_w + n * scale_w_step, mask=n < outputs, other=0.0)
    shift = by_row
    if has_bias:
        shift = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if early:
        # Weights are constant; all that follows depends on earlier kernels.
        tl.extra.cuda.gdc_wait()
    if not scale_rows:
        by_token = tl.load(scale_a + m * scale_a_step, mask=m < tokens, other=0.0)
    total = _sums(
        *(a, w, scale_a, scale_w, n, m, tokens, outputs, inputs, a_row, w_row),
        *(scale_a_step, scale_w_step, scale_a_column, scale_w_column),
        *(part, split, block_m, block_n, block_k, even, bulk, scale_rows),
    )
    if is_split:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = block_n * block_m
        inner = tl.arange(0, block_n)[:, None] * block_m + tl.arange(0, block_m)[None, :]
        base = partials + tile.to(tl.int64) * split * size + inner
        tl.store(base + part * size, total)
        # All threads must have stored before one of them signals it.
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if before == split - 1:
            total = tl.load(base, cache_modifier=".cg")
            for each in range(1, split):
                total += tl.load(base + each * size, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)  # For the next launch.
            _store_scaled(total, by_row, by_token, shift, n, m, out, tokens, outputs, has_bias)
    else:
        _store_scaled(total, by_row, by_token, shift, n, m, out, tokens, outputs, has_bias)


def _scale_steps(
    scale_a: torch.Tensor, scale_b: torch.Tensor, sizes: tuple[int, int, int], scale_rows: int
) -> tuple[int, int, int, int]:
    """Return the distances of scales: tokens', W's rows', and of either over a step through K."""
    tokens, outputs, inputs = sizes
    if not scale_rows:
        assert scale_a.numel() in (1, tokens) and scale_a.is_contiguous()
        assert scale_b.numel() in (1, outputs) and scale_b.is_contiguous()
        return int(scale_a.numel() > 1), int(scale_b.numel() > 1), 0, 0
    steps = triton.cdiv(inputs, BLOCK_K)
    assert scale_a.shape == (tokens, steps), scale_a.shape
    assert scale_b.shape == (triton.cdiv(outputs, scale_rows), steps), scale_b.shape
    return scale_a.stride(0), scale_b.stride(0), scale_a.stride(1), scale_b.stride(1)


def few_tokens_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    scale_rows: int = 0,
) -> torch.Tensor:
    """(M, K) · (K, N) -> (M, N) of scaled fp8 matrices, for up to `TOKENS_MAX` tokens.

    W's rows are the M side of wgmma, which takes at least 64 rows, so tokens are padded to 16 only.
    If that gives too few programs, K is split: each program stores its fp32 sums in a workspace and
    the last one adds them in the order of K, so equal input gives equal bits.

    Args:
        a: fp8, K contiguous, M of 1 to `TOKENS_MAX`.
        b: fp8, strides (1, any multiple of 16): the transpose of W's rows.
        scale_a: fp32, one element or one per row of `a`; in blocks (M, K / `BLOCK_K`).
        scale_b: fp32, one element or one per column of `b`; in blocks (N / `scale_rows`, K /
            `BLOCK_K`). Scales in blocks may have any strides.
        out_dtype: of the result.
        workspace: of the device.
        bias: (N,) or None.
        tiling: instead of the chosen one.
        scale_rows: rows of a block of W that has one scale; 0 where scales are not in blocks.
    """
    (tokens, inputs), outputs = a.shape, b.shape[1]
    assert b.shape[0] == inputs and a.stride(1) == 1 and b.stride(0) == 1, "K is not contiguous"
    tiling = tiling or tiling_for(tokens, outputs, inputs, in_blocks=bool(scale_rows))
    assert not scale_rows or tiling.block_k == BLOCK_K, tiling
    assert tiling.fits(tokens, outputs), "the workspace cannot hold the parts"
    out = torch.empty((tokens, outputs), dtype=out_dtype, device=a.device)
    if not tokens:
        return out
    a_row, w_row = a.stride(0), b.stride(1)
    rows: torch.Tensor | TensorDescriptor = b
    activations: torch.Tensor | TensorDescriptor = a
    if tiling.bulk:
        block = tiling.block_k
        rows = TensorDescriptor(b, [outputs, inputs], [w_row, 1], [tiling.block_n, block])
        activations = TensorDescriptor(a, [tokens, inputs], [a_row, 1], [tiling.block_m, block])
    _few_tokens[tiling.programs(tokens, outputs)](
        *(activations, rows, scale_a, scale_b, scale_b if bias is None else bias, out),
        *(workspace.partials, workspace.arrivals, tokens, outputs, inputs, a_row, w_row),
        *_scale_steps(scale_a, scale_b, (tokens, outputs, inputs), scale_rows),
        tiling.split,
        block_m=tiling.block_m,
        block_n=tiling.block_n,
        block_k=tiling.block_k,
        is_split=tiling.split > 1,
        has_bias=bias is not None,
        even=tiling.bulk or inputs % tiling.block_k == 0,
        bulk=tiling.bulk,
        early=tiling.early,
        scale_rows=scale_rows,
        launch_pdl=tiling.early,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out

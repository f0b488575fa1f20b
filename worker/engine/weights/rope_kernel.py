"""vLLM adapter: one Triton kernel that reorders a shard-major qkv row, normalizes and rotates it.

RoPE reads and writes the row anyway, so the reorder costs only v's bytes and no launch
(docs/adr/0013). Results are bit-identical to vLLM 0.32.0's CUDA kernels for bf16 and fp16.
`rotary_embedding` multiplies and adds in fp32 and rounds once; products of two 16-bit numbers are
exact, so contraction does not matter. `rms_norm` sums the squares of one 16-byte vector in order,
the vectors by cub's shuffle tree (neighbours first), and rounds once, after the weight. fp32 may
differ in the last bit, where contraction is free.
"""

import torch
import triton
import triton.language as tl

FEW_WARPS_UP_TO = 8192
"""Maximum elements of a row that 4 warps hold in registers; wider rows take 8."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_squares(  # type: ignore[no-untyped-def]
    x,
    heads: tl.constexpr,
    half: tl.constexpr,
    vector: tl.constexpr,
):
    """Sum fp32 (heads, half) to (heads,) in the order of vLLM's rms_norm."""
    lanes: tl.constexpr = half // vector
    even, odd = tl.split(tl.reshape(x, (heads, lanes, vector // 2, 2)))
    x0, x2 = tl.split(tl.reshape(even, (heads, lanes, vector // 4, 2)))
    x1, x3 = tl.split(tl.reshape(odd, (heads, lanes, vector // 4, 2)))
    if vector == 8:
        x0, x4 = tl.split(x0)
        x2, x6 = tl.split(x2)
        x1, x5 = tl.split(x1)
        x3, x7 = tl.split(x3)
        total = tl.math.fma(x1, x1, x0 * x0)
        total = tl.math.fma(x2, x2, total)
        total = tl.math.fma(x3, x3, total)
        total = tl.math.fma(x4, x4, total)
        total = tl.math.fma(x5, x5, total)
        total = tl.math.fma(x6, x6, total)
        total = tl.math.fma(x7, x7, total)
    else:
        tl.static_assert(vector == 4)
        total = tl.reshape(x0 * x0, (heads, lanes))
        x1 = tl.reshape(x1, (heads, lanes))
        x2 = tl.reshape(x2, (heads, lanes))
        x3 = tl.reshape(x3, (heads, lanes))
        total = tl.math.fma(x1, x1, total)
        total = tl.math.fma(x2, x2, total)
        total = tl.math.fma(x3, x3, total)
    # A sum over an axis of two has one order only, however it is compiled.
    if lanes >= 32:
        total = tl.sum(tl.reshape(total, (heads, lanes // 2, 2)), 2)
    if lanes >= 16:
        total = tl.sum(tl.reshape(total, (heads, 8, 2)), 2)
    if lanes >= 8:
        total = tl.sum(tl.reshape(total, (heads, 4, 2)), 2)
    if lanes >= 4:
        total = tl.sum(tl.reshape(total, (heads, 2, 2)), 2)
    return tl.sum(total, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _normalized(  # type: ignore[no-untyped-def]
    low,
    high,
    weight,
    epsilon,
    heads: tl.constexpr,
    half: tl.constexpr,
    vector: tl.constexpr,
):
    """Apply RMSNorm to heads given as two halves; round to the row's type, then return fp32."""
    x, y = low.to(tl.float32), high.to(tl.float32)
    total = _sum_of_squares(x, heads, half, vector) + _sum_of_squares(y, heads, half, vector)
    # head_dim is a power of two, so this product equals vLLM's quotient.
    scale = tl.math.rsqrt(total * (0.5 / half) + epsilon)[:, None]
    column = tl.arange(0, half)
    low_weight = tl.load(weight + column).to(tl.float32)[None, :]
    high_weight = tl.load(weight + half + column).to(tl.float32)[None, :]
    x = ((x * scale) * low_weight).to(low.dtype)
    y = ((y * scale) * high_weight).to(high.dtype)
    return x, y


# Positions are read one by one: their alignment must not compile another kernel while serving.
@triton.jit(do_not_specialize_on_alignment=["positions"])  # type: ignore[untyped-decorator]
def _rotate_shards(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    row_stride,
    epsilon,
    shards: tl.constexpr,
    q_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    q_tile: tl.constexpr,
    kv_tile: tl.constexpr,
    head_dim: tl.constexpr,
    vector: tl.constexpr,
    normed: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    half: tl.constexpr = head_dim // 2
    shard: tl.constexpr = (q_heads + 2 * kv_heads) * head_dim
    q_width: tl.constexpr = shards * q_heads * head_dim
    kv_width: tl.constexpr = shards * kv_heads * head_dim
    column = tl.arange(0, half)[None, :]
    wide = tl.arange(0, head_dim)[None, :]
    q_head = tl.arange(0, q_tile)[:, None]
    kv_head = tl.arange(0, kv_tile)[:, None]
    q_mask = q_head < shards * q_heads
    kv_mask = kv_head < shards * kv_heads
    base = qkv + row * row_stride

    q_from = base + (q_head // q_heads) * shard + (q_head % q_heads) * head_dim
    kv_from = base + (kv_head // kv_heads) * shard + (kv_head % kv_heads) * head_dim
    k_from = kv_from + q_heads * head_dim
    v_from = k_from + kv_heads * head_dim
    q_low = tl.load(q_from + column, mask=q_mask, other=0.0)
    q_high = tl.load(q_from + half + column, mask=q_mask, other=0.0)
    k_low = tl.load(k_from + column, mask=kv_mask, other=0.0)
    k_high = tl.load(k_from + half + column, mask=kv_mask, other=0.0)
    v = tl.load(v_from + wide, mask=kv_mask, other=0.0)
    cos = tl.load(cos_sin + position * head_dim + column).to(tl.float32)
    sin = tl.load(cos_sin + position * head_dim + half + column).to(tl.float32)

    if normed:
        q_low, q_high = _normalized(q_low, q_high, q_weight, epsilon, q_tile, half, vector)
        k_low, k_high = _normalized(k_low, k_high, k_weight, epsilon, kv_tile, half, vector)
    qx, qy = q_low.to(tl.float32), q_high.to(tl.float32)
    kx, ky = k_low.to(tl.float32), k_high.to(tl.float32)
    kind = v.dtype

    # Every warp has its part of the row in registers before any warp overwrites it.
    tl.debug_barrier()
    q_to = base + q_head * head_dim + column
    kv_to = base + q_width + kv_head * head_dim
    tl.store(q_to, (qx * cos - qy * sin).to(kind), mask=q_mask)
    tl.store(q_to + half, (qy * cos + qx * sin).to(kind), mask=q_mask)
    tl.store(kv_to + column, (kx * cos - ky * sin).to(kind), mask=kv_mask)
    tl.store(kv_to + half + column, (ky * cos + kx * sin).to(kind), mask=kv_mask)
    tl.store(kv_to + kv_width + wide, v, mask=kv_mask)


def rotate_shards(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    shards: int,
    heads: tuple[int, int],
    head_dim: int,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    warps: int | None = None,
) -> None:
    """Turn shard-major rows into natural order, normalized and rotated, in place.

    Args:
        q: (T, held q width) view at the start of rows [q0 k0 v0 | q1 k1 v1 | …] whose last
            dimension is contiguous; the whole rows it begins are rewritten as [q | k | v].
        positions: (T,) integers.
        cos_sin: (max position, head_dim) of q's type, [cos | sin], for neox pairs (d, d + half).
        shards: n, shards in a row.
        heads: query and KV heads of one shard.
        head_dim: elements of a head, all rotated; a power of two of at least 16.
        norm: RMSNorm weights of q and k, (head_dim,) each, and epsilon; None for no norm.
        warps: warps of the program that owns a row; None chooses by width.
    """
    if not q.shape[0]:
        return
    q_heads, kv_heads = heads
    q_weight, k_weight, epsilon = norm or (cos_sin, cos_sin, 0.0)
    width = shards * (q_heads + 2 * kv_heads) * head_dim
    _rotate_shards[(q.shape[0],)](
        *(q, positions, cos_sin, q_weight, k_weight, q.stride(0), epsilon),
        shards=shards,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_tile=triton.next_power_of_2(shards * q_heads),
        kv_tile=triton.next_power_of_2(shards * kv_heads),
        head_dim=head_dim,
        vector=16 // q.element_size(),
        normed=norm is not None,
        num_warps=warps or (4 if width <= FEW_WARPS_UP_TO else 8),
    )

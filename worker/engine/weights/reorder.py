"""vLLM adapter: one Triton kernel that restores the natural order of a shard-major qkv output.

Three strided copies cost five times as much on an H200 (+0.2 ms TPOT instead of +0.04 ms on the 8B
shape), because each launch reads and writes the whole row again in small pieces.
"""

import torch
import triton
import triton.language as tl

BLOCK_COLUMNS = 2048
"""Output columns that one program copies."""


@triton.jit  # type: ignore[untyped-decorator]
def _reorder(  # type: ignore[no-untyped-def]
    source,
    target,
    q_width,
    k_width,
    row_width,
    q_size: tl.constexpr,
    kv_size: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_q = column < q_width
    is_k = column < q_width + k_width
    in_q = column
    in_kv = column - tl.where(is_k, q_width, q_width + k_width)
    kv_start = tl.where(is_k, q_size, q_size + kv_size)
    shard: tl.constexpr = q_size + 2 * kv_size
    from_q = (in_q // q_size) * shard + in_q % q_size
    from_kv = (in_kv // kv_size) * shard + kv_start + in_kv % kv_size
    inside = column < row_width
    values = tl.load(source + row * row_width + tl.where(is_q, from_q, from_kv), mask=inside)
    tl.store(target + row * row_width + column, values, mask=inside)


def reorder_qkv(out: torch.Tensor, held: int, q_size: int, kv_size: int) -> torch.Tensor:
    """(T, held·[q k v]) -> (T, [all q | all k | all v]); sizes are one shard's widths."""
    natural = torch.empty_like(out)
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK_COLUMNS))
        _reorder[grid](
            *(out, natural, q_size * held, kv_size * held, width),
            q_size=q_size,
            kv_size=kv_size,
            block=BLOCK_COLUMNS,
            num_warps=4,
        )
    return natural

"""vLLM adapter: one Triton kernel for the gate of a feed-forward layer in a step of few rows.

vLLM's kernel gives each row to one program. One to 64 rows leave most of a GPU's 132
multiprocessors idle, so it takes 3.4 to 3.6 µs. Here several programs share a row
(docs/adr/0067).

Results are bit-identical to vLLM 0.32.0's CUDA kernel in bf16, fp16 and fp32. It computes silu in
fp32 with libdevice's exp and a correctly rounded division, rounds it to the type, and multiplies in
fp32 by `up + 0`, which turns -0 into +0. Contraction does not matter: libdevice's exp ends with a
product with a power of two, which is exact.
"""

import torch
import triton
import triton.language as tl

THREADS = 128
"""Threads of a program."""

ELEMENTS_PER_THREAD = (2, 8)
"""Elements that a thread computes of a small and of a large output; 8 are a 16-byte load."""

SMALL_ELEMENTS = 132 * 2048 * ELEMENTS_PER_THREAD[0]
"""Output elements that all threads of an H100 or H200 compute at once in small programs."""

OPTIONS = {"num_warps": THREADS // 32, "enable_reflect_ftz": False}
"""Triton's options. libdevice's functions would otherwise take subnormal numbers for zero."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def]
    x,
    out,
    x_row,
    inner,
    block: tl.constexpr,
    has_libdevice: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < inner
    at = x + row * x_row + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + inner, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    power = tl.extra.cuda.libdevice.exp(-wide) if has_libdevice else tl.exp(-wide)
    silu = tl.div_rn(wide, 1.0 + power).to(gate.dtype)
    product = silu.to(tl.float32) * (up.to(tl.float32) + 0.0)
    tl.store(out + row * inner + column, product.to(gate.dtype), mask=inside)


def silu_mul(x: torch.Tensor, per_thread: int | None = None) -> torch.Tensor:
    """(…, [gate | up]) -> (…, inner): silu(gate) * up, of any rows; the result is contiguous.

    Args:
        x: bf16, fp16 or fp32, of an even width; rows with any distance are read in place.
        per_thread: elements that a thread computes, a power of two; None chooses by size.
    """
    *outer, width = x.shape
    inner = width // 2
    out = torch.empty((*outer, inner), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    small, large = ELEMENTS_PER_THREAD
    per_thread = per_thread or (small if out.numel() <= SMALL_ELEMENTS else large)
    block = THREADS * per_thread
    _silu_mul[(triton.cdiv(inner, block), rows.shape[0])](
        *(rows, out, rows.stride(0), inner),
        block=block,
        has_libdevice=x.is_cuda,
        **OPTIONS,
    )
    return out


def compile_silu_mul(dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels for rows whose parts are multiples of 16 elements, as models have them.

    Later launches load what this made: nothing is compiled while serving.
    """
    x = torch.zeros((1, 32), dtype=dtype, device=device)
    for per_thread in ELEMENTS_PER_THREAD:
        silu_mul(x, per_thread)

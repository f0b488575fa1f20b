"""Triton gives the silu kernel the arithmetic of vLLM's kernel on an H100; needs no GPU."""

import re

import pytest

pytest.importorskip("vllm")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.engine.weights.silu_kernel import OPTIONS, THREADS, _silu_mul

H100 = GPUTarget("cuda", 90, 32)
POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


def ptx_of(kind: str, per_thread: int, fuses: bool) -> str:
    """PTX for rows whose parts are multiples of 16 elements."""
    source = ASTSource(
        _silu_mul,
        {
            "x": POINTERS[kind],
            "out": POINTERS[kind],
            "x_row": "i32",
            "inner": "i32",
            "block": "constexpr",
            "has_libdevice": "constexpr",
        },
        constexprs={"block": THREADS * per_thread, "has_libdevice": True},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(4)},
    )
    options = {**OPTIONS, "enable_fp_fusion": fuses}
    return str(triton.compile(source, target=H100, options=options).asm["ptx"])


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("per_thread", [2, 8])
@pytest.mark.parametrize("kind", POINTERS)
def test_an_h100_computes_as_vllms_kernel_does(kind: str, per_thread: int, fuses: bool) -> None:
    code = ptx_of(kind, per_thread, fuses)
    flushing = set(re.findall(r"\S+\.ftz\S*", code))
    assert flushing == {"ex2.approx.ftz.f32"}, "libdevice's exp flushes in this place alone"
    assert code.count("ex2.approx.ftz.f32") == per_thread
    assert code.count("div.rn.f32") == per_thread, "the division is correctly rounded"
    assert code.count("fma.rm.f32") == per_thread, "exp is libdevice's, not Triton's"
    assert len(re.findall(r"add(?:\.rn)?\.f32.*, 0f00000000;", code)) == per_thread, "-0 becomes +0"
    bits = 32 if kind == "fp32" else 16
    width = min(per_thread * bits, 128)
    vector = "" if width == 32 else f"v{width // 32}."
    assert f"ld.global.{vector}b32" in code, "a thread loads its elements at once"

"""The fp8 GEMM of few tokens: its choice of tilings, and what is compiled for Hopper.

`test_interpreted_kernels.py` has its results, in Triton's interpreter.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from tests.harness.vllm.fp8_tilings import SHARED_BYTES, check_tiling
from worker.engine.weights import fp8, fp8_blocks, fp8_kernel
from worker.engine.weights.fp8_kernel import (
    BLOCK_K,
    BUCKETS,
    TOKENS_MAX,
    TUNED,
    TUNED_IN_BLOCKS,
    Tiling,
    default_tiling,
    tiling_for,
)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_default_tilings_can_run(bucket: int) -> None:
    for outputs in (16, 1024, 3072, 4096, 5120, 8192, 16384, 131072):
        for inputs in (16, 1024, 1536, 2048, 3584, 6400, 7168, 14336, 53248):
            for in_blocks in (False, True):
                tiling = default_tiling(bucket, outputs, inputs, in_blocks=in_blocks)
                check_tiling(tiling, bucket, outputs, inputs)
                assert not in_blocks or tiling.block_k == BLOCK_K


def test_tuned_tilings_can_run() -> None:
    for (bucket, outputs, inputs), tiling in [*TUNED.items(), *TUNED_IN_BLOCKS.items()]:
        assert bucket in BUCKETS
        check_tiling(tiling, bucket, outputs, inputs)
    assert all(tiling.block_k == BLOCK_K for tiling in TUNED_IN_BLOCKS.values())


def compiled() -> Iterator[Any]:
    """Every bucket's tiling, and what differs from it: of the smallest, and of others if `long`."""
    for bucket in BUCKETS:
        yield bucket, {}
        for change in ({"bulk": False}, {"split": 1, "early": True}, {"block_k": BLOCK_K}):
            marks = [] if bucket == BUCKETS[0] else [pytest.mark.long]
            yield pytest.param(bucket, change, marks=marks)


@pytest.mark.parametrize(("bucket", "change"), [*compiled()])
def test_it_compiles_for_hopper(
    bucket: int, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton brings NVIDIA's assembler along, so no GPU is needed to see what it makes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # What it is by default, without a warning.
    tiling = replace(default_tiling(bucket, 4096, 14336), **change)
    constants = {
        "block_m": tiling.block_m,
        "block_n": tiling.block_n,
        "block_k": tiling.block_k,
        "is_split": tiling.split > 1,
        "has_bias": True,
        "even": tiling.bulk,
        "bulk": tiling.bulk,
        "early": tiling.early,
        "scale_rows": 128 if "block_k" in change else 0,
    }
    a, w = (
        f"tensordesc<fp8e4nv[{rows}, {tiling.block_k}]>" if tiling.bulk else "*fp8e4nv"
        for rows in (tiling.block_m, tiling.block_n)
    )
    kinds = {"a": a, "w": w, "out": "*bf16", "arrivals": "*i32"}
    kinds |= dict.fromkeys(("scale_a", "scale_w", "bias", "partials"), "*fp32")
    kernel = fp8_kernel._few_tokens
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in constants else kinds.get(name, "i32")
            for name in kernel.arg_names
        },
        constexprs=constants,
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(kernel.arg_names)
            if name in ("inputs", "outputs", "a_row", "w_row")
            or (name in ("a", "w") and not tiling.bulk)
        },
    )
    made = compile_for(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiling.warps, "num_stages": tiling.stages},
    )
    text = made.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64" in text, tiling
    assert ("cp.async.bulk.tensor" in text) is tiling.bulk, tiling
    assert ("cp.async.cg" in text) is not tiling.bulk, tiling
    assert ("atom.global.gpu.acq_rel" in text) is (tiling.split > 1), tiling
    assert ("griddepcontrol.wait" in text) is tiling.early, tiling
    assert made.metadata.shared <= SHARED_BYTES, tiling


def test_the_shapes_of_70b_fill_an_h200_without_parts() -> None:
    for bucket in (16, 32, 64, 256):
        tiling = default_tiling(bucket, 8192, 2048)
        tiles_m, tiles_n, parts = tiling.programs(bucket, 8192)
        assert (tiles_m * tiles_n, parts) == (128, 1)
    assert default_tiling(16, 4096, 7168).split == 2
    assert default_tiling(16, 4096, 1024).split == 1, "no steps to spare"


def test_a_tuned_tiling_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tiling(16, 64, 512, 1, 3, 4, False)
    monkeypatch.setitem(TUNED, (16, 96, 4096), own)
    tiling_for.cache_clear()
    assert tiling_for(9, 96, 4096) is own
    assert tiling_for(17, 96, 4096) == default_tiling(32, 96, 4096)
    tiling_for.cache_clear()


def test_few_tokens_are_the_same_for_both_modules() -> None:
    assert TOKENS_MAX == fp8.FEW_TOKENS == fp8_blocks.COPY_TOKENS - 1
    assert BLOCK_K == fp8_blocks.COLUMNS


def prepared() -> fp8.StridedFp8Kernel:
    kernel = fp8.StridedFp8Kernel.__new__(fp8.StridedFp8Kernel)
    kernel.prepare(torch.device("cpu"))
    return kernel


def test_only_hopper_gpus_have_the_kernel_and_prove_it() -> None:
    kernel = prepared()
    assert kernel.few_tokens is None
    assert not kernel.proof_tokens


def test_every_bucket_and_path_is_proved_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "is_hopper", lambda device: True)
    counts = prepared().proof_tokens
    fp8_kernel.workspace_of.cache_clear()
    few = [count for count in counts if count <= TOKENS_MAX]
    assert {fp8_kernel.bucket_of(count) for count in few} == set(BUCKETS)
    many = [count for count in counts if count > TOKENS_MAX]
    assert any(count < fp8.MANY_TOKENS for count in many)
    assert any(count >= fp8.MANY_TOKENS for count in many)

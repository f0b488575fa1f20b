"""fp8 weights with a scale per block: views of ranks whose borders fall on blocks.

On CPU vLLM's Triton kernel computes them in plain torch; tests/gpu/test_models.py has the others.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import (
    BlockWiseTorchFP8ScaledMMLinearKernel,
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    MarlinFP8ScaledMMLinearKernel,
    TritonFp8BlockScaledMMKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm import flashinfer
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.warmup import deep_gemm_warmup

from tests.harness.vllm.block_kernels import spread, triton_blocks_on_cpu
from tests.harness.vllm.quantized_models import write_quantized
from tests.harness.vllm.trees import BLOCK, BLOCK_SCALES, CPU, Trees, tree_process, write_model
from worker.engine.weights import fp8, fp8_blocks, fp8_kernel
from worker.engine.weights.deep_gemm import PROVIDER, note_kernels
from worker.engine.weights.layers import ViewError
from worker.engine.weights.selftest import prove_tree, stored_rows
from worker.engine.weights.tree import build_tp_tree, foreign_bytes

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
QKV = "model.layers.0.self_attn.qkv_proj"
GATE_UP = "model.layers.0.mlp.gate_up_proj"
DOWN = "model.layers.0.mlp.down_proj"
PUBLISHED, ONLINE = "published", "fp8_per_block"
"""Blocks of 128: of a checkpoint, and made by vLLM while it loads one."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trees]]:
    folder = tmp_path_factory.mktemp("blocks")
    with tree_process(folder), triton_blocks_on_cpu():
        for kind in BLOCK_SCALES:
            write_model(folder / kind, kind)
        quantized, plain = write_quantized(folder, "fp8-block")
        bf16: dict[str, Any] = {"shards": 2, "dtype": "bfloat16"}
        yield {
            **{kind: Trees(folder / kind) for kind in BLOCK_SCALES},
            PUBLISHED: Trees(quantized, **bf16),
            ONLINE: Trees(plain, quantization=ONLINE, **bf16),
        }


KINDS = (*BLOCK_SCALES, PUBLISHED, ONLINE)


def linears(tree: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in tree.named_modules() if isinstance(each, LinearBase)}


def prove(trees: Trees, tree: nn.Module, width: int, rank: int) -> None:
    own = {"width": width, "rank_in_group": rank, "device": CPU, "shards": trees.shards}
    assert prove_tree(tree, trees.replica, **own)


def meant(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return weight.float() * spread(scales, [BLOCK, BLOCK], (weight.shape[0], weight.shape[1]))


@pytest.mark.parametrize("kind", BLOCK_SCALES)
def test_rows_and_scales_are_the_checkpoints(
    loaded: dict[str, Trees], tmp_path: Path, kind: str
) -> None:
    disk, replica = write_model(tmp_path, kind), loaded[kind].replica
    for name, layer in linears(replica).items():
        prefix, part = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
        rows = meant(layer.weight.data, fp8_blocks.block_scales(layer))
        if part in FUSED:
            rows = rows[stored_rows(layer.output_partition_sizes, 4, 1, 0)]
        for piece in FUSED.get(part, (part,)):
            stored = f"{prefix}.{piece}"
            wanted = meant(disk[f"{stored}.weight"], disk[f"{stored}.{BLOCK_SCALES[kind]}"])
            own, rows = rows[: len(wanted)], rows[len(wanted) :]
            assert torch.equal(own, wanted), stored
        assert not len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_views_that_compute_right(loaded: dict[str, Trees], kind: str) -> None:
    trees = loaded[kind]
    prove(trees, trees.replica, 1, 0)
    for width in (2, 4)[: trees.shards // 2]:
        for rank in range(width):
            tree = trees.view(width, rank)
            assert foreign_bytes(tree, trees.replica) == 0
            prove(trees, tree, width, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_inputs_keeps_its_distances(loaded: dict[str, Trees], kind: str) -> None:
    """DeepGEMM wants scales in one piece, or transposed in one piece."""
    trees = loaded[kind]
    tree = linears(trees.view(2, 1))
    for name, source in linears(trees.replica).items():
        own = tree[name]
        scales = fp8_blocks.block_scales(own)
        assert type(fp8.kernel_of(own)) is TritonFp8BlockScaledMMKernel
        is_row = isinstance(source, RowParallelLinear)
        assert own.weight.stride() == source.weight.stride()
        assert (scales.t() if is_row else scales).is_contiguous()
        assert source.requires_unquantized_input is is_row
        assert set(own._parameters) == set(source._parameters)
        missing = {each for each in vars(source) if not hasattr(own, each)}
        assert not missing, (name, missing)


@pytest.mark.parametrize("kind", BLOCK_SCALES)
@pytest.mark.parametrize("borrow", ["none", "ffn"])
def test_halves_of_the_weights_are_viewed_too(
    loaded: dict[str, Trees], kind: str, borrow: str
) -> None:
    trees = loaded[kind]
    half = trees.part(2, 1, borrow)
    whole = linears(trees.replica)
    for name, layer in linears(half).items():
        source = whole[name]
        parts = source.output_size // layer.output_size_per_partition
        rows = fp8_blocks.block_scales(source).chunk(parts)[-1]
        if isinstance(layer, RowParallelLinear):
            parts = source.input_size // layer.input_size_per_partition
            rows = fp8_blocks.block_scales(source).chunk(parts, 1)[-1]
        assert torch.equal(fp8_blocks.block_scales(layer), rows), name
    with trees.group(4, 3) as config:
        tree = build_tp_tree(config, half, shards=trees.shards, width=4, rank_in_group=3)
    assert foreign_bytes(tree, half) == 0
    prove_tree(tree, half, width=4, rank_in_group=3, device=CPU, shards=trees.shards)


@pytest.mark.parametrize(("name", "dim"), [(GATE_UP, 0), (DOWN, 1)])
def test_scales_of_the_other_rank_are_refused(
    loaded: dict[str, Trees], name: str, dim: int
) -> None:
    trees = loaded["block"]
    tree = trees.view(2, 1)
    whole = fp8_blocks.block_scales(trees.replica.get_submodule(name))
    tree.get_submodule(name).weight_scale_inv.data = whole.chunk(2, dim)[0]
    with pytest.raises(ViewError, match=f"layer {name} of rank 1"):
        prove(trees, tree, 2, 1)


def test_columns_of_the_other_rank_are_refused(loaded: dict[str, Trees]) -> None:
    trees = loaded["block"]
    tree = trees.view(2, 1)
    tree.get_submodule(DOWN).weight.data = trees.replica.get_submodule(DOWN).weight.data.chunk(
        2, 1
    )[0]
    with pytest.raises(ViewError, match=f"layer {DOWN} of rank 1"):
        prove(trees, tree, 2, 1)


def kernel(kind: type[Any], **fields: Any) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(fields)
    return made


@pytest.mark.parametrize(
    ("chosen", "of_columns"),
    [
        (DeepGemmFp8BlockScaledMMKernel, DeepGemmFp8BlockScaledMMKernel),
        (TritonFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel),
        (CutlassFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel),
        (BlockWiseTorchFP8ScaledMMLinearKernel, TritonFp8BlockScaledMMKernel),
        (FlashInferFp8DeepGEMMDynamicBlockScaledKernel, DeepGemmFp8BlockScaledMMKernel),
    ],
)
def test_which_kernel_computes_a_share(
    loaded: dict[str, Trees], chosen: type[Any], of_columns: type[Any]
) -> None:
    """A range of rows is a matrix of its own; of a range of columns the rows are further apart."""
    trees = loaded["block"]
    tree, whole = linears(trees.view(2, 0)), linears(trees.replica)
    known = fp8.kernel_of(whole[DOWN])
    assert known is not None
    fallback = kernel(DeepGemmFp8BlockScaledMMKernel, config=known.config)
    made = kernel(chosen, config=known.config, fallback=fallback)
    with trees.group(2, 0):
        for name, wanted in ((QKV, chosen), (DOWN, of_columns)):
            found = fp8_blocks.view_block_kernel(name, tree[name], whole[name], made)
            assert type(found) is wanted
            own = fp8_blocks.view_block_kernel(name, whole[name], whole[name], made)
            assert own is made


def test_on_hopper_a_range_of_columns_has_our_kernel_and_cutlass(
    loaded: dict[str, Trees], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens read the range in place; for many CUTLASS gets a packed copy of it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fp8_blocks, "is_hopper", lambda device: True)
    trees = loaded["block"]
    tree, whole = linears(trees.view(2, 1)), linears(trees.replica)
    known = fp8.kernel_of(whole[DOWN])
    assert known is not None
    made = kernel(CutlassFp8BlockScaledMMKernel, config=known.config)
    made.weight_group_shape = known.weight_group_shape
    monkeypatch.setattr(fp8_blocks, "COLUMNS", known.weight_group_shape.col)
    with trees.group(2, 1):
        own: Any = fp8_blocks.view_block_kernel(DOWN, tree[DOWN], whole[DOWN], made)
    assert type(own) is fp8_blocks.BlockRangeKernel
    calls: list[tuple[str, bool, bool]] = []

    def noted(name: str) -> Any:
        def run(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> str:
            assert torch.equal(b.view(torch.uint8), tree[DOWN].weight.view(torch.uint8))
            calls.append((name, b.is_contiguous(), scales[1].is_contiguous()))
            return name

        return run

    def ours(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Any:
        return noted("ours")(a, b.t(), *rest[:2])

    monkeypatch.setattr(own, "few_tokens", ours)
    monkeypatch.setattr(
        CutlassFp8BlockScaledMMKernel,
        "apply_block_scaled_mm",
        lambda self, *operands: noted("cutlass")(*operands),
    )
    weight, scales = tree[DOWN].weight, fp8_blocks.block_scales(tree[DOWN])
    for tokens in (1, 256, 257):
        x = torch.empty((tokens, weight.shape[1]))
        own.apply_block_scaled_mm(x, weight, torch.empty(tokens, scales.shape[1]), scales)
    assert calls == [("ours", False, False)] * 2 + [("cutlass", True, True)]
    few = [count for count in own.proof_tokens if count < fp8_blocks.COPY_TOKENS]
    assert {fp8_kernel.bucket_of(count) for count in few} == set(fp8_kernel.BUCKETS)
    assert max(own.proof_tokens) >= fp8_blocks.COPY_TOKENS


def test_a_kernel_that_packs_weights_is_refused(loaded: dict[str, Trees]) -> None:
    layer = linears(loaded["block"].replica)[DOWN]
    packing = kernel(MarlinFP8ScaledMMLinearKernel)
    with pytest.raises(ViewError, match=r"Marlin.*which packs weights: choose another kernel"):
        fp8_blocks.view_block_kernel(DOWN, layer, layer, packing)
    owner = SimpleNamespace(quant_method=SimpleNamespace(fp8_linear=packing))
    with pytest.raises(ViewError, match=r"computes with Marlin.*which packs its weights"):
        fp8.check_quantized(DOWN, owner)


@pytest.mark.parametrize("what", ["weight", "scales"])
def test_weights_of_another_form_are_refused(loaded: dict[str, Trees], what: str) -> None:
    layer = linears(loaded["block"].replica)[DOWN]
    name = "weight" if what == "weight" else "weight_scale_inv"
    whole = layer._parameters[name]
    layer._parameters[name] = Parameter(whole.data[:-1], requires_grad=False)
    try:
        with pytest.raises(ViewError, match="not a plain fp8 matrix"):
            fp8.check_quantized(DOWN, layer)
    finally:
        layer._parameters[name] = whole


def test_shards_that_cut_blocks_are_refused(tmp_path: Path, loaded: dict[str, Trees]) -> None:
    """Of a fused layer while it is made, of others with the first tree that would cut them."""
    write_model(tmp_path, "block")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [2 * BLOCK, BLOCK]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ViewError, match=r"blocks of 64 rows .* shards of 32, 32, 32 rows"):
        Trees(tmp_path)
    trees = loaded["block"]
    source = trees.replica.get_submodule(DOWN)
    share = SimpleNamespace(
        weight_block_size=[BLOCK, BLOCK],
        input_size_per_partition=48,
        output_size_per_partition=source.output_size_per_partition,
    )
    with pytest.raises(ViewError, match=r"48 inputs per rank in width 2, which cuts blocks of 32"):
        fp8_blocks.check_share(DOWN, share, source, 2)


def test_flashinfers_kernel_rounds_few_tokens_by_itself(loaded: dict[str, Trees]) -> None:
    """The self-test rounds its input as the kernel does: DeepGEMM's scales are powers of two."""
    source = inspect.getsource(flashinfer._dynamic_flashinfer_deepgemm_blockscale_gemm_impl)
    assert f"input.shape[0] < {fp8_blocks.FLASHINFER_TOKENS}" in source
    assert "if envs.VLLM_BATCH_INVARIANT:\n        return run_deepgemm" in source
    own = fp8.kernel_of(linears(loaded["block"].replica)[DOWN])
    assert own is not None

    def coarse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scales = own.quant_fp8(x)
        return quantized, torch.exp2(torch.ceil(torch.log2(scales)))

    made = kernel(
        FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
        config=own.config,
        weight_group_shape=own.weight_group_shape,
        quant_fp8=own.quant_fp8,
        fallback=kernel(DeepGemmFp8BlockScaledMMKernel, quant_fp8=coarse),
    )
    for tokens in (8, 31, 32, 512):
        x = torch.randn(tokens, 2 * BLOCK)
        quantized, scales = own.quant_fp8(x) if tokens < 32 else coarse(x)
        wanted = quantized.float() * spread(scales, [1, BLOCK], (tokens, 2 * BLOCK))
        assert torch.equal(fp8_blocks.as_quantized(made, x), wanted)


def test_layers_that_deep_gemm_computes_are_noted_for_its_warm_up(
    loaded: dict[str, Trees],
) -> None:
    """Also where they are views, and not where a view has another kernel."""
    tree = loaded["block"].view(2, 0)
    config = fp8.kernel_of(linears(tree)[DOWN]).config  # type: ignore[union-attr]
    deep_gemm = kernel(DeepGemmFp8BlockScaledMMKernel, config=config)
    dynamic = kernel(FlashInferFp8DeepGEMMDynamicBlockScaledKernel, fallback=deep_gemm)
    for name, layer in linears(tree).items():
        setattr(layer, PROVIDER, object())
        chosen = {"qkv_proj": dynamic, "down_proj": deep_gemm}.get(name.rpartition(".")[2])
        if chosen is not None:
            layer.quant_method = fp8.ViewedFp8Method(chosen)
    note_kernels(tree)
    for name, layer in linears(tree).items():
        is_noted = name.endswith(("qkv_proj", "down_proj"))
        assert getattr(layer, PROVIDER, None) is (deep_gemm if is_noted else None), name
    assert PROVIDER in inspect.getsource(deep_gemm_warmup._deep_gemm_linear_data)

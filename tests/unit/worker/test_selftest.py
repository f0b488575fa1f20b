"""The self-test passes honest trees and refuses each kind of wrong one, on real vLLM layers."""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn

from tests.harness.vllm.trees import CPU, SHARDS, Trees, tree_process, write_and_name
from worker.engine.weights import fp8
from worker.engine.weights.layers import ShardPlan, ViewError
from worker.engine.weights.selftest import column_error, prove_tree, stored_rows

ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
KINDS = 5
"""qkv, o, gate_up, down and the lm_head."""

CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_per_channel": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
    "fp8_per_tensor": {"dtype": "bfloat16", "quantization": "fp8_per_tensor"},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trees]]:
    folder = tmp_path_factory.mktemp("trees")
    with tree_process(folder):
        model = write_and_name(folder / "model")
        yield {name: Trees(model, **engine) for name, engine in CASES.items()}


def prove(trees: Trees, tree: nn.Module, width: int = 2, rank: int = 1) -> int:
    return prove_tree(
        tree, trees.replica, width=width, rank_in_group=rank, device=CPU, shards=trees.shards
    )


@pytest.mark.parametrize("case", CASES)
def test_honest_trees_pass(built: dict[str, Trees], case: str) -> None:
    trees = built[case]
    assert prove(trees, trees.replica, 1, 0) == KINDS
    for width in (2, 4):
        for rank in range(width):
            assert prove(trees, trees.view(width, rank), width, rank) == KINDS


def test_a_tree_of_another_rank_is_refused(built: dict[str, Trees]) -> None:
    trees = built["bfloat16"]
    with pytest.raises(ViewError, match="self-test: layer model"):
        prove(trees, trees.view(2, 0), 2, 1)


def rows_shifted(tree: nn.Module, trees: Trees, layer: str) -> None:
    weight = tree.get_submodule(layer).weight
    weight.data = weight.data.roll(1, 0)


def one_row_wrong(tree: nn.Module, trees: Trees, layer: str) -> None:
    weight = tree.get_submodule(layer).weight
    weight.data = weight.data.clone()
    weight.data[5] = weight.data[6]


def not_finite(tree: nn.Module, trees: Trees, layer: str) -> None:
    weight = tree.get_submodule(layer).weight
    weight.data = weight.data.clone()
    weight.data[5, 5] = float("nan")


def columns_of_the_other_rank(tree: nn.Module, trees: Trees, layer: str) -> None:
    whole = trees.replica.get_submodule(layer).weight.data
    tree.get_submodule(layer).weight.data = whole.chunk(2, 1)[0]


def rows_of_the_other_rank(tree: nn.Module, trees: Trees, layer: str) -> None:
    whole = trees.replica.get_submodule(layer).weight.data
    tree.get_submodule(layer).weight.data = whole.chunk(2, 0)[0]


def bias_of_the_other_rank(tree: nn.Module, trees: Trees, layer: str) -> None:
    whole = trees.replica.get_submodule(layer).bias.data
    tree.get_submodule(layer).bias.data = whole.chunk(2, 0)[0]


def natural_rows_taken_for_shards(tree: nn.Module, trees: Trees, layer: str) -> None:
    """A replica that was loaded in natural order, seen as shard-major."""
    module, source = tree.get_submodule(layer), trees.replica.get_submodule(layer)
    order = stored_rows(source.output_partition_sizes, trees.shards, 1, 0)
    module.weight.data = source.weight.data[order].chunk(2, 0)[1]


def strides_ignored(tree: nn.Module, trees: Trees, layer: str) -> None:
    """What vLLM's CUTLASS fp8 kernel does: read the view as if it were packed."""
    module = tree.get_submodule(layer)
    honest = module.quant_method.apply

    def apply(layer: nn.Module, x: torch.Tensor, bias: Any = None) -> Any:
        view = layer.weight.data
        layer.weight.data = view.as_strided(view.shape, (view.shape[1], 1))
        try:
            return honest(layer, x, bias)
        finally:
            layer.weight.data = view

    module.quant_method = type("Broken", (), {"apply": staticmethod(apply)})()


SABOTAGE: list[tuple[Callable[[nn.Module, Trees, str], None], str]] = [
    (rows_shifted, ATTENTION + "qkv_proj"),
    (rows_shifted, MLP + "gate_up_proj"),
    (rows_shifted, MLP + "down_proj"),
    (one_row_wrong, ATTENTION + "qkv_proj"),
    (one_row_wrong, "lm_head"),
    (not_finite, MLP + "gate_up_proj"),
    (columns_of_the_other_rank, ATTENTION + "o_proj"),
    (columns_of_the_other_rank, MLP + "down_proj"),
    (rows_of_the_other_rank, ATTENTION + "qkv_proj"),
    (rows_of_the_other_rank, "lm_head"),
    (bias_of_the_other_rank, ATTENTION + "qkv_proj"),
    (natural_rows_taken_for_shards, ATTENTION + "qkv_proj"),
    (natural_rows_taken_for_shards, MLP + "gate_up_proj"),
    (strides_ignored, ATTENTION + "o_proj"),
    (strides_ignored, MLP + "down_proj"),
]


@pytest.mark.parametrize("case", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sabotage", "layer"), SABOTAGE, ids=[f"{do.__name__}-{of}" for do, of in SABOTAGE]
)
def test_a_wrong_tree_is_refused(
    built: dict[str, Trees],
    case: str,
    sabotage: Callable[[nn.Module, Trees, str], None],
    layer: str,
) -> None:
    trees = built[case]
    tree = trees.view(2, 1)
    sabotage(tree, trees, layer)
    with pytest.raises(ViewError, match=rf"layer {layer} of rank 1 in width 2 is off by"):
        prove(trees, tree)


def test_a_replica_that_does_not_restore_natural_order_is_refused(
    built: dict[str, Trees], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = built["bfloat16"]
    layer = trees.replica.get_submodule(ATTENTION + "qkv_proj")
    monkeypatch.setattr(layer, "plan", ShardPlan(1, 1))
    with pytest.raises(ViewError, match="qkv_proj of rank 0 in width 1"):
        prove(trees, trees.replica, 1, 0)


@pytest.mark.parametrize("width", [1, 2])
def test_rows_handed_on_as_stored_are_judged_as_stored(
    built: dict[str, Trees], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Where the rotary module reorders, qkv itself must not."""
    trees = built["bfloat16"]
    tree = trees.replica if width == 1 else trees.view(width, width - 1)
    for number in range(2):
        layer = tree.get_submodule(f"model.layers.{number}.self_attn.qkv_proj")
        monkeypatch.setattr(layer, "reorders", False)
    assert prove(trees, tree, width, width - 1) == KINDS
    if width > 1:
        rows_shifted(tree, trees, ATTENTION + "qkv_proj")
        with pytest.raises(ViewError, match="qkv_proj"):
            prove(trees, tree, width, width - 1)


@pytest.mark.parametrize("layer", [ATTENTION + "o_proj", MLP + "down_proj"])
@pytest.mark.parametrize("case", ["fp8_per_channel", "fp8_per_tensor"])
def test_an_fp8_kernel_that_ignores_strides_is_refused(
    built: dict[str, Trees], case: str, layer: str
) -> None:
    trees = built[case]
    tree = trees.view(2, 1)
    kernel = tree.get_submodule(layer).quant_method.fp8_linear
    honest = kernel.apply_scaled_mm

    def packed(self: Any, **given: Any) -> torch.Tensor:
        b = given.pop("B")
        out: torch.Tensor = honest(B=b.as_strided(b.shape, (1, b.shape[0])), **given)
        return out

    kernel.apply_scaled_mm = MethodType(packed, kernel)
    with pytest.raises(ViewError, match=f"layer {layer} of rank 1"):
        prove(trees, tree)


def test_channel_scales_of_the_other_rank_are_refused(built: dict[str, Trees]) -> None:
    trees = built["fp8_per_channel"]
    tree = trees.view(2, 1)
    name = MLP + "gate_up_proj"
    whole = trees.replica.get_submodule(name).weight_scale.data
    tree.get_submodule(name).weight_scale.data = whole.chunk(2, 0)[0]
    with pytest.raises(ViewError, match=f"layer {name} of rank 1"):
        prove(trees, tree)


def test_fp8_columns_of_the_other_rank_are_refused(built: dict[str, Trees]) -> None:
    trees = built["fp8_per_tensor"]
    tree = trees.view(2, 1)
    name = MLP + "down_proj"
    assert isinstance(tree.get_submodule(name).quant_method.fp8_linear, fp8.StridedFp8Kernel)
    whole = trees.replica.get_submodule(name).weight.data
    tree.get_submodule(name).weight.data = whole.chunk(2, 0)[0]
    with pytest.raises(ViewError, match=f"layer {name} of rank 1"):
        prove(trees, tree)


def test_stored_rows_count_every_row_once() -> None:
    parts = [16, 8, 8]
    for width in (1, 2, 4):
        ranks = [stored_rows(parts, SHARDS, width, rank) for rank in range(width)]
        assert sorted(torch.cat(ranks).tolist()) == list(range(32))
    # Two ranks of four shards [4 q, 2 k, 2 v]: rank 1 has shards 2 and 3, natural order.
    assert stored_rows(parts, SHARDS, 2, 1).tolist() == [
        *[16, 17, 18, 19, 24, 25, 26, 27],
        *[20, 21, 28, 29],
        *[22, 23, 30, 31],
    ]


def test_stored_rows_of_shared_heads_are_counted_once() -> None:
    # Four shards [4 q, 2 k, 2 v], of which two neighbours each hold the same k and v.
    parts = [16, 8, 8]
    assert stored_rows(parts, SHARDS, 2, 1, 2).tolist() == [
        *[16, 17, 18, 19, 24, 25, 26, 27],
        *[20, 21],
        *[22, 23],
    ]
    assert stored_rows(parts, SHARDS, 1, 0, 2)[16:].tolist() == [4, 5, 20, 21, 6, 7, 22, 23]
    assert stored_rows(parts, SHARDS, 4, 3, 2).tolist() == list(range(24, 32))


def test_errors_are_judged_by_column() -> None:
    wanted = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0))
    out = wanted.clone()
    assert column_error(out, wanted) == 0
    out[:, 77] = wanted[:, 78]
    assert float((out - wanted).norm() / wanted.norm()) < 0.03, "the whole hides it"
    assert column_error(out, wanted) > 1
    out[0, 0] = float("nan")
    assert column_error(out, wanted) == float("inf")
    zeros = torch.zeros(4, 4)
    assert column_error(zeros, zeros) == 0

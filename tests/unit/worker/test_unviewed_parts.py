"""Quantized parts are vLLM's own layers if each rank holds one of its own; no tree views them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

from tests.harness.vllm.trees import CPU, Trees, tree_process, write_and_name
from worker.engine.weights import tree
from worker.engine.weights.layers import ViewError, is_unviewed, sizes_of
from worker.engine.weights.moe import RankedExperts
from worker.engine.weights.part_memory import Unit, UnitKind, layout_of, units_of
from worker.engine.weights.selftest import prove_tree
from worker.engine.weights.tree import build_tp_tree, foreign_bytes, weight_bytes

PARTS = 2


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trees]:
    """fp8 with a scale per channel, which aileron could view, in a cell of two ranks."""
    folder = tmp_path_factory.mktemp("unviewed")
    with tree_process(folder):
        yield Trees(write_and_name(folder / "channel", "channel"), shards=PARTS)


def linears(tree: nn.Module) -> dict[str, LinearBase]:
    return {name: each for name, each in tree.named_modules() if isinstance(each, LinearBase)}


@pytest.mark.parametrize(("borrow", "unviewed"), [("none", True), ("all", True), ("ffn", False)])
def test_parts_are_unviewed_unless_attention_is_whole(
    trees: Trees, borrow: str, unviewed: bool
) -> None:
    found = linears(trees.part(PARTS, 0, borrow))
    assert len(found) > PARTS
    assert {is_unviewed(layer) for layer in found.values()} == {unviewed}


def test_half_of_the_parts_of_four_ranks_is_viewed(trees: Trees, tmp_path: Path) -> None:
    """Two ranks hold the same part, so tp of four needs halves of it."""
    wide = Trees(write_and_name(tmp_path, "channel"), shards=2 * PARTS)
    assert not any(map(is_unviewed, linears(wide.part(PARTS, 0, "all")).values()))


@pytest.mark.parametrize("viewable", [False, True])
def test_a_rank_alone_has_vllms_own_layers_where_nobody_could_view_them(
    viewable: bool, trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test compares weights that could be viewed with a copy, also where nobody does."""
    monkeypatch.setattr(tree, "takes_views", lambda config: viewable)
    alone = Trees(write_and_name(tmp_path, "channel"), shards=1).replica
    assert {is_unviewed(layer) for layer in linears(alone).values()} == {not viewable}
    assert prove_tree(alone, alone, width=1, rank_in_group=0, device=CPU, shards=1) > 1


def test_a_replicated_layer_is_tried_with_all_its_inputs(trees: Trees) -> None:
    """vLLM gives such layers no sizes per partition unless their quantization does."""
    with trees.group(1, 0):
        layer = ReplicatedLinear(32, 4, bias=False)
    nn.init.normal_(layer.weight)
    layer.quant_method.process_weights_after_loading(layer)
    layer.unviewed = True
    assert sizes_of(layer) == (32, 4)
    owner = nn.Module()
    owner.gate = layer
    assert prove_tree(owner, owner, width=1, rank_in_group=0, device=CPU, shards=1) == 1


def test_tp_computes_with_the_loaded_layers_themselves(trees: Trees) -> None:
    part = trees.part(PARTS, 1, "all")
    held, bits = weight_bytes(part), {name: id(each) for name, each in linears(part).items()}
    with trees.group(PARTS, 1) as config:
        tree = build_tp_tree(config, part, shards=PARTS, width=PARTS, rank_in_group=1)
        assert {name: id(each) for name, each in linears(tree).items()} == bits
        assert foreign_bytes(tree, part) == 0
        proved = [
            prove_tree(each, part, width=PARTS, rank_in_group=1, device=CPU, shards=PARTS)
            for each in (part, tree)
        ]
    assert min(proved) > 0
    assert weight_bytes(part) == held
    head = tree.lm_head.weight
    assert len(head) == len(part.lm_head.weight) // PARTS, "each rank computes its vocabulary"


def broken(part: nn.Module, monkeypatch: pytest.MonkeyPatch, apply: object) -> str:
    layer = linears(part)["model.layers.0.mlp.down_proj"]
    monkeypatch.setattr(layer, "quant_method", SimpleNamespace(apply=apply))
    with pytest.raises(ViewError) as refused:
        prove_tree(part, part, width=PARTS, rank_in_group=0, device=CPU, shards=PARTS)
    return str(refused.value)


def missing(*_: object) -> torch.Tensor:
    raise AttributeError("no such operator")


def test_a_layer_without_a_kernel_on_this_device_is_refused(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = trees.part(PARTS, 0, "all")
    said = broken(part, monkeypatch, missing)
    assert "layers.0.mlp.down_proj" in said
    assert "cannot run (no such operator): serve a checkpoint of another quantization" in said


def test_a_layer_whose_kernel_gives_no_numbers_is_refused(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = trees.part(PARTS, 0, "all")
    size = linears(part)["model.layers.0.mlp.down_proj"].output_size_per_partition

    def nothing(_layer: object, x: torch.Tensor, _bias: object) -> torch.Tensor:
        return x.new_full((len(x), size), torch.nan)

    assert "not finite" in broken(part, monkeypatch, nothing)
    assert "gives (8, 1)" in broken(part, monkeypatch, lambda _layer, x, _bias: x[:, :1])


def test_a_kernel_that_keeps_the_weights_to_itself_lends_nothing(trees: Trees) -> None:
    """As vLLM's int8 kernel on CPU, which leaves the scales alone."""
    part = trees.part(PARTS, 0, "all")
    layer = linears(part)["model.layers.1.self_attn.o_proj"]
    del layer._parameters["weight"]
    with pytest.raises(ViewError, match=r"layers.1.self_attn.o_proj keeps its weights inside of"):
        [*map(layout_of, units_of(part))]


def test_quantized_experts_lend_nothing_yet() -> None:
    """Their kernel keeps the scales of the part that it was made for."""
    experts = RankedExperts.__new__(RankedExperts)
    nn.Module.__init__(experts)
    experts.quant_method = SimpleNamespace()
    experts.w13_weight = nn.Parameter(torch.zeros(8), requires_grad=False)
    with pytest.raises(ViewError, match=r"mlp.experts has quantized experts.*--borrow none"):
        layout_of(Unit("mlp.experts", UnitKind.EXPERTS, {"": experts}))

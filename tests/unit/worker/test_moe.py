"""A rank's experts: views of the replica's, which together give what all of them give."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn

from tests.harness.vllm.expert_models import EXPERTS, write_experts
from tests.harness.vllm.trees import CPU, Trees, experts_process
from worker.engine.weights.layers import ViewError
from worker.engine.weights.moe import experts_of, prove_experts
from worker.engine.weights.selftest import prove_tree
from worker.engine.weights.tree import check_widths, foreign_bytes


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trees]:
    """A random Qwen3-MoE of two layers."""
    folder = tmp_path_factory.mktemp("moe")
    write_experts(folder / "model")
    with experts_process(folder):
        yield Trees(folder / "model", dtype="float32")


def prove(trees: Trees, tree: nn.Module, width: int, rank: int) -> int:
    return prove_experts(tree, trees.replica, width=width, rank_in_group=rank, device=CPU)


@pytest.mark.parametrize("width", [2, 4])
def test_ranks_hold_views_and_add_up_to_the_whole(trees: Trees, width: int) -> None:
    name, full = next(experts_of(trees.replica))
    x = torch.randn(33, 128)
    weights, ids = torch.rand(33, EXPERTS).topk(2)
    total = torch.zeros_like(x)
    for rank in range(width):
        tree = trees.view(width, rank)
        assert foreign_bytes(tree, trees.replica) == 0
        assert prove(trees, tree, width, rank) == 2
        own = dict(experts_of(tree))[name]
        assert own.w13_weight.shape[0] == EXPERTS // width
        total += own.forward_modular(x.clone(), weights, ids.int())
    expected = full.forward_modular(x, weights, ids.int())
    torch.testing.assert_close(total, expected)
    assert expected.norm() > 0.1


def test_the_proof_of_a_tree_takes_in_its_experts(trees: Trees) -> None:
    tree = trees.view(2, 1)
    kinds = prove_tree(
        trees.replica, trees.replica, width=1, rank_in_group=0, device=CPU, shards=trees.shards
    )
    proved = prove_tree(
        tree, trees.replica, width=2, rank_in_group=1, device=CPU, shards=trees.shards
    )
    assert proved == kinds + 2


@pytest.mark.parametrize("fault", ["w13_weight", "w2_weight", "_expert_map"])
def test_experts_of_another_rank_are_refused(trees: Trees, fault: str) -> None:
    tree, other = trees.view(2, 1), trees.view(2, 0)
    name, own = next(experts_of(tree))
    setattr(own, fault, getattr(dict(experts_of(other))[name], fault))
    with pytest.raises(ViewError, match=f"experts {name} of rank 1 in width 2"):
        prove(trees, tree, 2, 1)


def test_experts_that_do_not_divide_are_refused(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_widths(trees.config, 4)
    model = trees.config.model_config
    monkeypatch.setattr(type(model), "get_num_experts", lambda _model: 6)
    with pytest.raises(ViewError, match="does not divide the model's 6 experts"):
        check_widths(trees.config, 4)
    check_widths(trees.config, 2)

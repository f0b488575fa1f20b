"""The proof of whole trees finds what no layer alone shows, and gated layers are found by trial."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.config import set_current_vllm_config

from tests.harness.vllm.trees import CPU, HEADS, HIDDEN, LAYERS, Trees, tree_process, write_and_name
from worker.engine.sequence_parallel.attention import heads_by_rank, qkv_and_output
from worker.engine.weights.gated import view_gated
from worker.engine.weights.layers import ShardMajorMerged, ViewError
from worker.engine.weights.model_proof import TOKENS, compare, logits_of
from worker.engine.weights.tree import loaded_range


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trees]:
    """A model in fp32, for four shards."""
    folder = tmp_path_factory.mktemp("proof")
    with tree_process(folder):
        yield Trees(write_and_name(folder / "model"), dtype="float32")


def computed(trees: Trees, spoil: Any = None) -> torch.Tensor:
    """The logits of a tree of width 1, which is a view of the replica in every layer."""
    tree = trees.view(1, 0)
    if spoil is not None:
        spoil(tree)
    found = logits_of("the tree", tree, tree, trees.config, CPU)
    assert found is not None
    return found


def test_a_tree_of_views_computes_the_logits_of_the_replica(trees: Trees) -> None:
    wanted = logits_of("the model", trees.replica, trees.replica, trees.config, CPU)
    assert wanted is not None
    assert wanted.shape[0] == TOKENS
    compare("the tree", computed(trees), wanted, torch.float32)
    assert "forward" not in vars(trees.replica.model.layers[0].self_attn.attn)


def norm_is_off(tree: nn.Module) -> None:
    norm = tree.model.norm
    norm.weight = nn.Parameter(norm.weight * torch.linspace(0.5, 1.5, HIDDEN))


def residual_is_lost(tree: nn.Module) -> None:
    tree.model.layers[1].mlp.forward = torch.zeros_like


def heads_are_swapped(tree: nn.Module) -> None:
    attention = tree.model.layers[0].self_attn
    given = attention.qkv_proj.ordered
    attention.qkv_proj.ordered = lambda rows: given(rows).roll(HIDDEN // HEADS, -1)


def positions_are_off(tree: nn.Module) -> None:
    attention = tree.model.layers[0].self_attn
    rope = attention.rotary_emb
    del attention.rotary_emb
    attention.rotary_emb = lambda positions, q, k: rope(positions.flip(0), q, k)


@pytest.mark.parametrize(
    "spoil", [norm_is_off, residual_is_lost, heads_are_swapped, positions_are_off]
)
def test_what_differs_between_the_layers_is_found(trees: Trees, spoil: Any) -> None:
    wanted = computed(trees)
    with pytest.raises(ViewError, match=r"the tree computes other logits .*Leave this width"):
        compare("the tree", computed(trees, spoil), wanted, torch.float32)


def test_a_model_whose_code_fails_is_refused(trees: Trees) -> None:
    def fails(tree: nn.Module) -> None:
        tree.model.layers[0].mlp.forward = lambda x: x[:, : HIDDEN // 2]

    with pytest.raises(ViewError, match="the tree cannot compute a step"):
        computed(trees, fails)


def test_numbers_that_are_not_finite_are_refused() -> None:
    logits = torch.ones(TOKENS, 8)
    with pytest.raises(ViewError):
        compare("the tree", torch.full_like(logits, torch.nan), logits, torch.bfloat16)


# Layers that an activation takes in stored order


def merged(trees: Trees) -> list[ShardMajorMerged]:
    return [each for each in trees.replica.modules() if isinstance(each, ShardMajorMerged)]


def test_a_row_wise_activation_takes_the_stored_order(trees: Trees) -> None:
    assert [layer.row_wise for layer in merged(trees)] == [True] * LAYERS


def test_another_activation_gets_natural_order_and_computes_the_same(trees: Trees) -> None:
    """Its halves are interleaved, so rows of one shard are no rows of all."""
    mlps = [layer.mlp for layer in trees.replica.model.layers]
    given = [mlp.act_fn for mlp in mlps]
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(1))
    try:
        for mlp in mlps:
            mlp.act_fn = Interleaved()
        assert view_gated(trees.replica) == 0
        assert not any(layer.row_wise for layer in merged(trees))
        with torch.no_grad(), set_current_vllm_config(trees.config):
            rows, _ = mlps[0].gate_up_proj(x)
        gate_up = rows.unflatten(-1, (2, -1))
        assert gate_up.shape[-1] == mlps[0].down_proj.input_size
    finally:
        for mlp, act in zip(mlps, given, strict=True):
            mlp.act_fn = act
        assert view_gated(trees.replica) == LAYERS


class Interleaved(nn.Module):  # type: ignore[misc]
    """An activation over neighbouring columns."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(T, 2·I) -> (T, I)."""
        return torch.sigmoid(rows[..., ::2]) * rows[..., 1::2]


# Where sp exchanges


def test_ranks_that_share_a_kv_head_get_a_copy_each() -> None:
    own: Any = SimpleNamespace(num_heads=1, num_kv_heads=1, head_size=2, head_size_v=2)
    q = torch.arange(8.0)[None]
    k, v = torch.tensor([[10.0, 11, 12, 13]]), torch.tensor([[20.0, 21, 22, 23]])
    found = heads_by_rank(own, q, k, v, 4).unflatten(-1, (4, -1))[0].tolist()
    assert found == [
        [0, 1, 10, 11, 20, 21],
        [2, 3, 10, 11, 20, 21],
        [4, 5, 12, 13, 22, 23],
        [6, 7, 12, 13, 22, 23],
    ]


def test_tokens_travel_beside_products_where_the_code_reads_them_there_alone(
    trees: Trees,
) -> None:
    attention = trees.replica.model.layers[0].self_attn
    assert qkv_and_output(attention) == ("qkv_proj", "o_proj")

    class Gated(type(attention)):  # type: ignore[misc]
        def forward(self, positions: Any, hidden_states: Any) -> Any:
            qkv, _ = self.qkv_proj(hidden_states)
            return qkv * hidden_states.sigmoid()

    kind = type(attention)
    try:
        attention.__class__ = Gated
        assert qkv_and_output(attention) is None
    finally:
        attention.__class__ = kind
    attention.forward = attention.forward
    assert qkv_and_output(attention) is None, "its code may have been replaced"
    del attention.forward


# Parameters of no layer that is known


def test_a_range_is_the_one_that_the_loader_copies() -> None:
    full = torch.arange(12.0).view(6, 2)
    param = nn.Parameter(torch.empty((2, 2), device="meta"), requires_grad=False)
    assert loaded_range(param, full) is full, "nothing says which range"
    param.weight_loader = lambda own, given: own.data.copy_(given[2:4])
    found = loaded_range(param, full)
    assert found.tolist() == [[4, 5], [6, 7]]
    assert found.data_ptr() == full[2:].data_ptr(), "a view, no copy"
    param.weight_loader = lambda own, given: own.data.copy_(given[1:3])
    assert loaded_range(param, full) is full, "no range of a rank"

"""Units in several parts, of which a rank borrows the others', give what whole layers give.

Slots hold NaN while no part is in use (tests/harness/faults/poisoned_ring.py).
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.distributed import parallel_state

from comm_pool.loans import loan_plan
from tests.harness.faults import poisoned_ring
from tests.harness.vllm.block_kernels import triton_blocks_on_cpu
from tests.harness.vllm.expert_models import write_experts
from tests.harness.vllm.shared_parts import SharedParts, output_of, outputs
from tests.harness.vllm.trees import HEADS, HIDDEN, INNER, VOCAB, Trees, tree_process
from tests.harness.vllm.trees import write_and_name as write
from worker.engine.weights import lending
from worker.engine.weights.borrowed import (
    BorrowedEmbeddings,
    BorrowedFeedForward,
    BorrowedLmHead,
    BorrowedOutput,
    BorrowedQKV,
)
from worker.engine.weights.layers import ViewError
from worker.engine.weights.tree import foreign_bytes

RANKS = 4
FEED_FORWARD = ["model.layers.0.mlp", "model.layers.1.mlp"]
ALL = [
    f"model.layers.{layer}.{unit}"
    for layer in range(2)
    for unit in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp")
]
UNITS = {"ffn": FEED_FORWARD, "all": ["model.embed_tokens", *ALL, "lm_head"]}
KINDS = {
    "qkv_proj": BorrowedQKV,
    "o_proj": BorrowedOutput,
    "mlp": BorrowedFeedForward,
    "lm_head": BorrowedLmHead,
    "embed_tokens": BorrowedEmbeddings,
}
PIECES = 2
"""Of each part of the lm_head: it is larger than a feed-forward network's slot."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("borrowed")
    with tree_process(folder), triton_blocks_on_cpu():
        yield folder


@pytest.fixture(scope="module")
def trees(process: Path) -> Trees:
    """A Qwen2 of two layers, whose qkv has biases."""
    return Trees(write(process / "plain"), dtype="float32")


@pytest.fixture(scope="module")
def biased(process: Path) -> Trees:
    """A Llama whose layers all have biases: those of row-parallel layers count once."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        attention_bias=True,
        mlp_bias=True,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter)
    model.save_pretrained(process / "biased")
    return Trees(process / "biased", dtype="float32")


@pytest.fixture(scope="module")
def moe(process: Path) -> Iterator[Trees]:
    """A random Qwen3-MoE of two layers."""
    folder = write_experts(process / "moe", vocab_size=VOCAB)
    # vLLM makes this group for a model with experts alone, and the process began with another.
    parallel_state._EP = parallel_state._TP
    try:
        yield Trees(folder, dtype="float32")
    finally:
        parallel_state._EP = None


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "make_ring", poisoned_ring.poisoned_ring)


def compare(trees: Trees, shared: SharedParts, rank: int, error_max: float = 3e-6) -> nn.Module:
    """One step of a rank beside the whole layers; returns its tree."""
    tree, own = shared.tree(rank), shared.borrowings[rank]
    own.ring.begin_step()
    dtype = trees.base.model_config.dtype
    borrowed, whole = outputs(tree, own, dtype), outputs(trees.replica, own, dtype)
    assert [*borrowed] == [*own.units]
    for name, out in whole.items():
        assert out.norm() > 0.1
        error = (borrowed[name] - out).abs().max() / out.abs().max()
        if name.endswith(("qkv_proj", "embed_tokens")):
            assert torch.equal(borrowed[name], out), name
        assert error < error_max, name
    assert foreign_bytes(tree, shared.loaded[rank], own.lent) == 0
    return tree


@pytest.mark.parametrize("borrow", ["ffn", "all"])
@pytest.mark.parametrize("parts", [2, 4])
def test_units_in_parts_give_what_whole_ones_give(trees: Trees, parts: int, borrow: str) -> None:
    shared = SharedParts(trees, RANKS, parts, borrow)
    lent = shared.bits()
    for rank in range(RANKS):
        modules = dict(compare(trees, shared, rank).named_modules())
        assert [*shared.borrowings[rank].units] == UNITS[borrow]
        for name in UNITS[borrow]:
            assert type(modules[name]) is KINDS[name.rpartition(".")[2]]
            others = (parts - 1) * (PIECES if name == "lm_head" else 1)
            assert len(modules[name].parts) == 1 + others
        own = shared.borrowings[rank]
        assert len(own.ring.loans) == len({"ffn": FEED_FORWARD, "all": ALL}[borrow]) * (parts - 1)
        assert len(own.lm_head_ring.loans) == (PIECES * (parts - 1) if borrow == "all" else 0)
        slots = {each.slot.data_ptr() for each in own.ring.loans}
        assert {each.slot.data_ptr() for each in own.lm_head_ring.loans} <= slots, "it has grown"
    assert shared.bits() == lent, "a lender's memory has changed"


@pytest.mark.parametrize(
    ("kind", "error_max"),
    [("fp8", 0.05), ("fp8-static", 0.01), ("channel", 0.05), ("block", 0.01)],
)
def test_quantized_units_in_parts_give_what_whole_ones_give(
    process: Path, kind: str, error_max: float
) -> None:
    """Each part rounds its input by its own scale, unless that is static, and adds in bf16."""
    trees = Trees(write(process / kind, kind))
    for parts in (2, 4):
        shared = SharedParts(trees, RANKS, parts, "all")
        for rank in range(RANKS):
            compare(trees, shared, rank, error_max=error_max)


@pytest.mark.parametrize("whole_layers", [1, 2])
def test_layers_that_a_rank_holds_whole_are_not_borrowed(trees: Trees, whole_layers: int) -> None:
    """Of one whole layer it is the first; their parts lie where the rank has copied them."""
    shared = SharedParts(trees, RANKS, 4, "all", whole_layers)
    for rank in range(RANKS):
        compare(trees, shared, rank)
        own = shared.borrowings[rank]
        assert own.whole_layers == whole_layers
        tables = [
            shared.memory_of(peer, "model.embed_tokens")[0] for peer in range(RANKS) if peer != rank
        ]
        lent = sum(each.nbytes for each in own.lent) - sum(each.nbytes for each in tables)
        kept = own.lent_bytes["whole_layers"]
        assert own.lent_bytes["ring"] == lent - kept
        of_a_part = sum(each.nbytes for each in shared.memory_of(rank, "model.layers.0."))
        assert kept == 3 * of_a_part * whole_layers
        assert len(own.ring.loans) == 3 * 3 * (2 - whole_layers)
        for name, unit in own.units.items():
            # Embeddings are read where they lie.
            is_whole = name != "lm_head" and (
                name == "model.embed_tokens" or int(name.split(".")[2]) < whole_layers
            )
            assert all((part.loan is None) == is_whole for part in unit.parts[1:]), name


@pytest.mark.parametrize("parts", [2, 4])
def test_biases_of_all_parts_together_count_once(biased: Trees, parts: int) -> None:
    shared = SharedParts(biased, RANKS, parts, "all")
    for rank in range(RANKS):
        compare(biased, shared, rank)


@pytest.mark.parametrize("borrow", ["ffn", "all"])
def test_experts_in_parts_give_what_all_of_them_give(moe: Trees, borrow: str) -> None:
    for parts in (2, 4):
        shared = SharedParts(moe, RANKS, parts, borrow)
        for rank in range(RANKS):
            compare(moe, shared, rank)


@pytest.mark.parametrize("parts", [2, 4])
def test_each_number_of_slots_gives_the_same_bits(
    trees: Trees, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for slots in (1, 2, parts, 16):
        monkeypatch.setattr(lending, "loan_plan", functools.partial(loan_plan, slots=slots))
        shared = SharedParts(trees, RANKS, parts, "all")
        own = shared.borrowings[1]
        loans = len(own.ring.loans) // 3
        distinct = {loan.slot.data_ptr() for loan in own.ring.loans}
        assert len(distinct) == 3 * min(slots, loans)
        tree = shared.tree(1)
        own.ring.begin_step()
        found.append(outputs(tree, own))
    for other in found[1:]:
        assert all(torch.equal(other[name], out) for name, out in found[0].items())


def test_a_step_after_one_that_was_aborted_gives_the_same_bits(trees: Trees) -> None:
    shared = SharedParts(trees, RANKS, 4, "all")
    tree, own = shared.tree(2), shared.borrowings[2]
    own.ring.begin_step()
    first = outputs(tree, own)
    own.ring.begin_step()
    output_of(dict(tree.named_modules())[ALL[0]])
    with pytest.raises(RuntimeError), own.ring.use(3):
        raise RuntimeError("a kernel failed")
    own.ring.begin_step()
    assert all(torch.equal(out, first[name]) for name, out in outputs(tree, own).items())


def test_a_step_of_the_tree_begins_with_its_first_copies(trees: Trees) -> None:
    """The tree itself begins each step: it is called, not told."""
    shared = SharedParts(trees, RANKS, 2, "all")
    tree, own = shared.tree(0), shared.borrowings[0]
    begun = []
    own.ring.begin_step = lambda: begun.append(True)  # type: ignore[method-assign]
    tree.forward = lambda: None
    tree()
    assert begun == [True]


def test_ranks_without_parts_have_nothing_to_borrow(trees: Trees) -> None:
    with pytest.raises(ViewError, match="no layers to borrow: use --borrow none"):
        SharedParts(trees, 1, 1, "all")

"""Cases of the fused RoPE under Triton's interpreter; `test_interpreted_kernels.py` runs them.

They need TRITON_INTERPRET=1 before triton's first import, so they have a process of their own. The
interpreter cuts fp32 to bf16 instead of rounding it; fp16 stands for 16-bit types where bits count.
"""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from tests.harness.vllm.interpreted_trees import (
    FAMILIES,
    LAYERS,
    MAX_POSITION,
    MODEL,
    config_of,
    replica_of,
    world,
)
from worker.engine.weights import rope_kernel
from worker.engine.weights.layers import restore_natural_order
from worker.engine.weights.rope import DeferredNorm, FusedRope, fuse_rope
from worker.engine.weights.rope_kernel import rotate_shards
from worker.engine.weights.tree import build_tp_tree, foreign_bytes

EPSILON = 1e-6
# (tokens, shards, q heads and KV heads of a shard, head_dim)
SHAPES = [
    (1, 4, 8, 2, 128),
    (3, 2, 5, 1, 64),
    (2, 4, 3, 1, 32),
    (2, 2, 2, 2, 256),
    (5, 8, 1, 1, 64),
    (2, 3, 7, 3, 32),
]
Shape = tuple[int, int, int, int, int]


def norm_as_cuda(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(…, head_dim) as vLLM's CUDA rms_norm adds and rounds: vectors in order, then neighbours."""
    squares = x.float().square().unflatten(-1, (-1, 16 // x.element_size()))
    total = squares[..., 0]
    for number in range(1, squares.shape[-1]):
        total = total + squares[..., number]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    scale = 1 / (total / x.shape[-1] + EPSILON).sqrt()
    return (x.float() * scale * weight.float()).to(x.dtype)


def rope_as_cuda(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """(T, heads, head_dim) as vLLM's CUDA rotary_embedding: fp32, one rounding."""
    cos, sin = cos_sin.float()[:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Case:
    """Random rows of one shape with all that rotating them takes."""

    def __init__(self, shape: Shape, dtype: torch.dtype, normed: bool) -> None:
        tokens, self.shards, q_heads, kv_heads, self.head_dim = shape
        torch.manual_seed(sum(shape))
        self.heads = (q_heads, kv_heads)
        self.sizes = tuple(count * self.head_dim for count in (q_heads, kv_heads, kv_heads))
        self.rows = torch.randn(tokens, self.shards * sum(self.sizes)).to(dtype)
        self.positions = torch.randint(0, MAX_POSITION, (tokens,))
        with set_current_vllm_config(VllmConfig()):
            self.rope = get_rope(self.head_dim, MAX_POSITION, dtype=dtype)
        weights = [torch.randn(self.head_dim).to(dtype) for _ in range(2)]
        self.norm = (weights[0], weights[1], EPSILON) if normed else None

    def expected(self) -> torch.Tensor:
        natural = restore_natural_order(self.rows, self.shards, self.sizes)
        split = natural.split([size * self.shards for size in self.sizes], -1)
        q, k = (part.unflatten(-1, (-1, self.head_dim)) for part in split[:2])
        if self.norm is not None:
            q, k = norm_as_cuda(q, self.norm[0]), norm_as_cuda(k, self.norm[1])
        at = self.rope.cos_sin_cache[self.positions]
        q, k = rope_as_cuda(q, at), rope_as_cuda(k, at)
        return torch.cat([q.flatten(1), k.flatten(1), split[2]], -1)

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotate in place, given as the model gives it: the q view of the rows."""
        rotate_shards(
            rows[:, : self.sizes[0] * self.shards],
            self.positions,
            self.rope.cos_sin_cache,
            shards=self.shards,
            heads=self.heads,
            head_dim=self.head_dim,
            norm=self.norm,
        )
        return rows


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_16_bit_rows_equal_vllms_kernels_bit_for_bit(shape: Shape, normed: bool) -> None:
    case = Case(shape, torch.float16, normed)
    assert torch.equal(case.fuse(case.rows.clone()), case.expected())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_rows_are_as_close_as_fp32_is(shape: Shape, normed: bool) -> None:
    case = Case(shape, torch.float32, normed)
    torch.testing.assert_close(
        case.fuse(case.rows.clone()), case.expected(), rtol=1e-6, atol=1e-5 if normed else 1e-6
    )


@pytest.mark.parametrize("normed", [False, True])
def test_bf16_rows_are_off_by_the_interpreters_cut_alone(normed: bool) -> None:
    case = Case(SHAPES[0], torch.bfloat16, normed)
    fused, expected = case.fuse(case.rows.clone()), case.expected()
    v = case.sizes[2] * case.shards
    assert torch.equal(fused[:, -v:], expected[:, -v:])
    torch.testing.assert_close(fused, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("normed", [False, True])
def test_vllms_own_modules_agree(normed: bool) -> None:
    case = Case(SHAPES[0], torch.float32, normed)
    natural = restore_natural_order(case.rows, case.shards, case.sizes)
    split = natural.split([size * case.shards for size in case.sizes], -1)
    q, k = (part.unflatten(-1, (-1, case.head_dim)) for part in split[:2])
    if case.norm is not None:
        q = nn.functional.rms_norm(q, (case.head_dim,), case.norm[0], EPSILON)
        k = nn.functional.rms_norm(k, (case.head_dim,), case.norm[1], EPSILON)
    q, k = case.rope.forward_native(case.positions, q.flatten(1), k.flatten(1))
    expected = torch.cat([q, k, split[2]], -1)
    torch.testing.assert_close(case.fuse(case.rows.clone()), expected, rtol=1e-5, atol=1e-5)


def test_only_the_rows_are_written_wherever_they_lie() -> None:
    case = Case(SHAPES[1], torch.float16, False)
    tokens, width = case.rows.shape
    backing = torch.full((tokens + 2, width + 24), 7.0, dtype=torch.float16)
    rows = backing[1:-1, 8 : 8 + width]
    rows.copy_(case.rows)
    assert torch.equal(case.fuse(rows), case.expected())
    rows.fill_(7.0)
    assert bool((backing == 7.0).all())


def test_no_rows_are_no_launch() -> None:
    case = Case(SHAPES[0], torch.float16, False)
    assert case.fuse(case.rows[:0].clone()).shape[0] == 0


@pytest.mark.parametrize("wrong", ["positions", "order", "weights"])
def test_the_comparison_sees_sabotage(wrong: str) -> None:
    case = Case(SHAPES[0], torch.float16, True)
    expected = case.expected()
    if wrong == "positions":
        case.positions = (case.positions + 1) % MAX_POSITION
    elif wrong == "order":
        case.rows = restore_natural_order(case.rows, case.shards, case.sizes)
    else:
        assert case.norm is not None
        case.norm = (case.norm[1], case.norm[0], EPSILON)
    assert not torch.equal(case.fuse(case.rows.clone()), expected)


def test_every_load_of_the_row_stands_before_the_barrier() -> None:
    source = inspect.getsource(rope_kernel._rotate_shards.fn)
    before, after = source.split("tl.debug_barrier()")
    assert before.count("tl.store(") == 0
    assert after.count("tl.load(") == 0
    assert after.count("tl.store(") == 5


# ---------------------------------------------------------------- in real vLLM trees


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with world(tmp_path_factory.mktemp("world")):
        yield


class Probe(nn.Module):  # type: ignore[misc]
    """Stands for attention; keeps what it is given."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.seen = (q.clone(), k.clone(), v.clone())
        return q


def attention_sees(tree: nn.Module, positions: torch.Tensor) -> list[torch.Tensor]:
    """What every attention layer gets for one random hidden state each."""
    seen: list[torch.Tensor] = []
    for layer in tree.model.layers:
        attention, probe = layer.self_attn, Probe()
        kept, attention.attn = attention.attn, probe
        torch.manual_seed(2)
        with torch.inference_mode():
            attention(positions, torch.randn(len(positions), MODEL["hidden_size"]))
        attention.attn = kept
        seen += probe.seen
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_sees_the_same_in_a_fused_tree(family: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, **FAMILIES[family])
    replica = replica_of(config)
    ropes = [layer.self_attn.rotary_emb for layer in replica.model.layers]
    steps = [torch.tensor([5]), torch.tensor([0, 1, 2, 9]), torch.empty(0, dtype=torch.long)]
    before = [attention_sees(replica, positions) for positions in steps]
    assert fuse_rope(replica, config, "cpu") == LAYERS
    assert fuse_rope(replica, config, "cpu") == 0
    assert all(type(layer.self_attn.rotary_emb) is FusedRope for layer in replica.model.layers)
    assert all(type(rope) is RotaryEmbedding for rope in ropes)
    for positions, expected in zip(steps, before, strict=True):
        for ours, vllms in zip(attention_sees(replica, positions), expected, strict=True):
            torch.testing.assert_close(ours, vllms, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shards", [2, 4])
def test_a_tp_tree_is_built_from_a_fused_replica_and_fused_if_it_holds_shards(
    family: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, **FAMILIES[family])
    replica = replica_of(config, shards)
    assert fuse_rope(replica, config, "cpu") == LAYERS
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=2, rank_in_group=1))
    config.compilation_config.static_forward_context = {}
    with set_current_vllm_config(config):
        tree = build_tp_tree(config, replica, shards=shards, width=2, rank_in_group=1)
    assert foreign_bytes(tree, replica) == 0
    first = tree.model.layers[0].self_attn
    assert type(first.rotary_emb) is RotaryEmbedding
    assert type(first.rotary_emb) is not type(replica.model.layers[0].self_attn.rotary_emb)
    before = [first.qkv_proj(torch.ones(1, MODEL["hidden_size"]))[0]]
    assert fuse_rope(tree, config, "cpu") == (LAYERS if shards == 4 else 0)
    after = first.qkv_proj(torch.ones(1, MODEL["hidden_size"]))[0]
    assert torch.equal(before[0], after) is (shards == 2)
    if family == "qwen3":
        assert (type(first.q_norm) is DeferredNorm) is (shards == 4)
        kept = replica.model.layers[0].self_attn.q_norm.weight
        assert first.q_norm.weight.data_ptr() == kept.data_ptr()


REFUSALS: dict[str, dict[str, Any]] = {
    "one shard": {},
    "another device": {},
    "torch.compile": {},
    "another norm kernel": FAMILIES["qwen3"],
    "norms that differ": FAMILIES["qwen3"],
    "one norm": FAMILIES["qwen3"],
    "head_dim": {"head_dim": 48},
    "partial rotary": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "another rope": {},
    "another attention": {},
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_not_known_keeps_its_own_reorder(why: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, **{**FAMILIES["llama"], **REFUSALS[why]})
    replica = replica_of(config, 1 if why == "one shard" else 4)
    attentions = [layer.self_attn for layer in replica.model.layers]
    if why == "torch.compile":
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    if why == "another norm kernel":
        config.kernel_config.ir_op_priority.rms_norm = ["native"]
    for attention in attentions:
        if why == "norms that differ":
            attention.k_norm.variance_epsilon *= 2
        if why == "one norm":
            del attention.k_norm
        if why == "another rope":
            attention.rotary_emb = copy.copy(attention.rotary_emb)
            attention.rotary_emb.__class__ = type("Other", (RotaryEmbedding,), {"forward_cuda": 1})
        if why == "another attention":
            attention.__class__ = type("Other", (type(attention),), {})
    kinds = [[type(module) for module in attention.modules()] for attention in attentions]
    assert fuse_rope(replica, config, "cuda" if why == "another device" else "cpu") == 0
    assert kinds == [[type(m) for m in attention.modules()] for attention in attentions]
    assert all(attention.qkv_proj.reorders for attention in attentions)


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_scaled_ropes_are_the_base_kernel_with_another_cache(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": MAX_POSITION // 2,
    }
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = config_of(tmp_path, **{**FAMILIES["llama"], "rope_parameters": rope})
    replica = replica_of(config)
    positions = torch.tensor([3, 40])
    before = attention_sees(replica, positions)
    assert fuse_rope(replica, config, "cpu") == LAYERS
    for ours, vllms in zip(attention_sees(replica, positions), before, strict=True):
        torch.testing.assert_close(ours, vllms, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_whole_is_noticed(tmp_path: Path) -> None:
    config = config_of(tmp_path, **FAMILIES["llama"])
    replica = replica_of(config)
    fuse_rope(replica, config, "cpu")
    q, k = torch.zeros(1, 256), torch.zeros(1, 128)
    with pytest.raises(AssertionError, match="not one qkv row"):
        replica.model.layers[0].self_attn.rotary_emb(torch.tensor([0]), q, k)

"""Cases of the silu kernel under Triton's interpreter; `test_interpreted_kernels.py` runs them.

The interpreter cuts fp32 to bf16 instead of rounding it; fp16 stands for 16-bit types where bits
count. It has no libdevice: its exp is numpy's.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from comm_pool.head_exchange import HeadExchange
from tests.harness.vllm.interpreted_trees import (
    FAMILIES,
    LAYERS,
    MODEL,
    config_of,
    replica_of,
    world,
)
from worker.engine.sequence_parallel.tree import build_sp_tree
from worker.engine.weights import silu
from worker.engine.weights.layers import ShardMajorMerged
from worker.engine.weights.silu import ROWS_MAX, plug_silu
from worker.engine.weights.silu_kernel import SMALL_ELEMENTS, silu_mul
from worker.engine.weights.tree import build_tp_tree

SHAPES = [(1, 16), (1, 1), (3, 255), (2, 257), (5, 1024), (4, 1025)]
"""Rows, and elements of a result's row."""
EDGES = [0.0, -0.0, 1.0, -1.0, 11.0, -11.0, 88.0, -88.0, 6e4, -6e4, 6e-8, -6e-8]


def silu_as_cuda(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as vLLM's CUDA kernel rounds: silu to the type, then the product."""
    gate, up = x.chunk(2, -1)
    wide = gate.float()
    # Of numpy, as the interpreter has it: torch's exp differs in the last bit.
    power = torch.from_numpy(np.exp(-wide.numpy()))
    silu = (wide / (1 + power)).to(x.dtype)
    return (silu.float() * (up.float() + 0)).to(x.dtype)


def rows_of(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, some of them large."""
    draw = torch.Generator().manual_seed(rows * inner)
    return (torch.randn((rows, 2 * inner), generator=draw) * 4).to(dtype)


def has_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fp16 tensors are equal, the signs of zeros as well."""
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16)))


@pytest.mark.parametrize("per_thread", [2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_16_bit_rows_equal_vllms_kernel_bit_for_bit(
    shape: tuple[int, int], per_thread: int
) -> None:
    x = rows_of(*shape, torch.float16)
    assert has_equal_bits(silu_mul(x, per_thread), silu_as_cuda(x))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_zeros_and_large_and_subnormal_numbers_are_as_vllms_kernel_has_them() -> None:
    gate = torch.tensor(EDGES, dtype=torch.float16).repeat_interleave(len(EDGES))
    up = torch.tensor(EDGES, dtype=torch.float16).repeat(len(EDGES))
    x = torch.cat([gate, up])[None]
    ours, wanted = silu_mul(x), silu_as_cuda(x)
    assert has_equal_bits(ours, wanted)
    assert bool(ours.isinf().any()) and bool((ours == 0).any())


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_rows_are_as_close_as_fp32_is(shape: tuple[int, int]) -> None:
    x = rows_of(*shape, torch.float32)
    torch.testing.assert_close(silu_mul(x), silu_as_cuda(x), rtol=1e-6, atol=1e-6)


def test_bf16_rows_are_off_by_the_interpreters_cuts_alone() -> None:
    x = rows_of(3, 300, torch.bfloat16)
    torch.testing.assert_close(silu_mul(x), silu_as_cuda(x), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_vllms_own_module_agrees(dtype: torch.dtype) -> None:
    x = rows_of(4, 300, dtype)
    # Both round twice, after an exp whose last bit differs.
    torch.testing.assert_close(silu_mul(x), SiluAndMul.forward_native(x), rtol=2**-9, atol=1e-6)


def test_rows_are_read_wherever_they_lie() -> None:
    x = rows_of(6, 96, torch.float16)
    wanted = silu_as_cuda(x)
    apart = torch.full((6, 256), torch.nan, dtype=torch.float16)
    apart[:, 16 : 16 + 192] = x
    transposed = x.t().contiguous().t()
    assert has_equal_bits(silu_mul(apart[:, 16 : 16 + 192]), wanted)
    assert has_equal_bits(silu_mul(transposed), wanted)
    assert has_equal_bits(silu_mul(x[::2]), wanted[::2])
    assert has_equal_bits(silu_mul(x.view(2, 3, 192)), wanted.view(2, 3, 96))
    assert has_equal_bits(silu_mul(x[0]), wanted[0])
    by_shard = silu_mul(x.view(12, 96))  # The stored order of two shards.
    assert has_equal_bits(by_shard, silu_as_cuda(x.view(12, 96)))
    assert by_shard.is_contiguous()


def test_nothing_else_is_written() -> None:
    x = rows_of(3, 70, torch.float16)
    before = x.clone()
    silu_mul(x)
    assert has_equal_bits(x, before)


def test_no_rows_are_no_launch() -> None:
    assert silu_mul(torch.empty(0, 64)).shape == (0, 32)


def test_large_outputs_take_wide_loads() -> None:
    x = torch.zeros(1, dtype=torch.float16).expand(2 * SMALL_ELEMENTS + 2048)
    x = x.clone().view(1, -1)
    x[:, -1024:] = 1.0
    x[:, x.shape[1] // 2 - 1024 : x.shape[1] // 2] = 1.0
    assert has_equal_bits(silu_mul(x), silu_as_cuda(x))


def test_the_comparison_sees_sabotage() -> None:
    x = rows_of(3, 300, torch.float16)
    gate, up = x.chunk(2, -1)
    assert not has_equal_bits(silu_mul(torch.cat([up, gate], -1)), silu_as_cuda(x))


# ---------------------------------------------------------------- in real vLLM trees


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with world(tmp_path_factory.mktemp("world")):
        yield


def gates_of(tree: nn.Module) -> list[SiluAndMul]:
    """The tree's activations."""
    return [each for each in tree.modules() if isinstance(each, SiluAndMul)]


def as_on_cuda(tree: nn.Module) -> list[int]:
    """Let the gates of a tree call vLLM's kernel for NVIDIA GPUs, which torch computes here.

    Returns:
        The number of rows of each of its calls.
    """
    calls: list[int] = []

    def op(out: torch.Tensor, x: torch.Tensor) -> None:
        calls.append(x.shape[:-1].numel())
        out.copy_(silu_as_cuda(x))

    for gate in gates_of(tree):
        gate.op, gate._forward_method = op, gate.forward_cuda
    return calls


def hidden(tree: nn.Module, tokens: int) -> torch.Tensor:
    """What the first feed-forward layer makes of random rows."""
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, MODEL["hidden_size"]), generator=draw)
    with torch.inference_mode():
        out: torch.Tensor = tree.model.layers[0].mlp(x)
    return out


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_take_our_kernel_and_many_vllms(family: str, shards: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, **FAMILIES[family])
    replica = replica_of(config, shards)
    calls = as_on_cuda(replica)
    # Shards that lie one after the other are rows of their own.
    per_token = shards if replica.model.layers[0].mlp.gate_up_proj.row_wise else 1
    assert per_token == shards
    few = ROWS_MAX // shards
    wanted = {tokens: hidden(replica, tokens) for tokens in (1, few, few + 1)}
    assert calls == [tokens * shards for tokens in wanted]
    calls.clear()
    assert plug_silu(replica, config, "cpu") == LAYERS
    assert plug_silu(replica, config, "cpu") == 0
    for tokens, expected in wanted.items():
        torch.testing.assert_close(hidden(replica, tokens), expected, rtol=1e-4, atol=1e-3)
    assert calls == [(few + 1) * shards]
    assert all(type(gate) is SiluAndMul for gate in gates_of(replica))


def test_tp_and_sp_trees_take_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, **FAMILIES["llama"])
    replica = replica_of(config, 2)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=2, rank_in_group=1))
    config.compilation_config.static_forward_context = {}
    with set_current_vllm_config(config):
        tree = build_tp_tree(config, replica, shards=2, width=2, rank_in_group=1)
    group: Any = SimpleNamespace(rank_in_group=1, device_group=None, device_communicator=None)
    heads = HeadExchange(MODEL["num_attention_heads"], MODEL["num_key_value_heads"], 2)
    sp = build_sp_tree(replica, tree, heads, group, config)
    as_on_cuda(replica)
    calls = as_on_cuda(tree)
    assert plug_silu(tree, config, "cpu") == LAYERS
    assert plug_silu(sp, config, "cpu") == LAYERS
    assert {id(gate) for gate in gates_of(sp)} == {id(gate) for gate in gates_of(replica)}
    assert plug_silu(replica, config, "cpu") == 0  # The same modules.
    fused = tree.model.layers[0].mlp.gate_up_proj
    assert isinstance(fused, ShardMajorMerged) and fused.plan.held == 1
    with torch.inference_mode():
        tree.model.layers[0].mlp.act_fn(torch.ones(2, 8))
    assert not calls


REFUSALS = ["another device", "torch.compile", "no triton", "another type", "native", "subclass"]


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_not_known_stays_vllms(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with set_current_vllm_config(VllmConfig()):
        gate = SiluAndMul()
    as_on_cuda(gate)
    mode, dtype = CompilationMode.NONE, torch.bfloat16
    if why == "torch.compile":
        mode = CompilationMode.VLLM_COMPILE
    if why == "no triton":
        monkeypatch.setattr(silu, "find_spec", lambda _: None)
    if why == "another type":
        dtype = torch.float64
    if why == "native":
        gate._forward_method = gate.forward_native
    if why == "subclass":
        gate.__class__ = type("Other", (SiluAndMul,), {})
        gate._forward_method = gate.forward_cuda
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(mode=mode),
        model_config=SimpleNamespace(dtype=dtype),
    )
    before = gate._forward_method
    assert plug_silu(gate, config, "cuda" if why == "another device" else "cpu") == 0
    assert gate._forward_method == before


def test_other_activations_stay_vllms() -> None:
    with set_current_vllm_config(VllmConfig()):
        other = GeluAndMul()
    other._forward_method = other.forward_cuda
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    assert plug_silu(other, config, "cpu") == 0

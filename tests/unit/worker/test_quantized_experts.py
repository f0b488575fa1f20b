"""Quantized experts of a rank: ranges of the replica's, whose kernels have the scales of these."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

from comm_pool.cpu.cell_memory import CellMemory, cell_memory
from tests.harness.vllm.block_kernels import triton_blocks_on_cpu
from tests.harness.vllm.expert_kernels import torch_experts_on_cpu
from tests.harness.vllm.expert_models import EXPERTS, write_experts
from tests.harness.vllm.mxfp4_models import write_gpt_oss
from tests.harness.vllm.part_trees import PARTS, rank_of_parts
from tests.harness.vllm.quantized_models import write_quantized
from tests.harness.vllm.shared_parts import SharedParts, output_of, outputs
from tests.harness.vllm.stored_trees import check_same, other_process
from tests.harness.vllm.trees import (
    CPU,
    FP8,
    HIDDEN,
    QUANTIZATION,
    VOCAB,
    Trees,
    experts_process,
    stored_as,
)
from worker.engine.weights import quantized_experts
from worker.engine.weights.layers import ViewError
from worker.engine.weights.moe import check_experts, experts_of, prove_experts
from worker.engine.weights.part_finder import find_part
from worker.engine.weights.part_memory import units_of
from worker.engine.weights.part_store import store_part
from worker.engine.weights.quantized_experts import has_common_scale
from worker.engine.weights.selftest import prove_tree
from worker.engine.weights.tree import foreign_bytes, load_replica, loading_plan

KINDS = ("fp8", "block", "channel", "compressed-block")
PUBLISHED = "fp8-block-moe"
"""Blocks of 128, as Qwen3-30B-A3B-FP8 has them."""
COMMON_SCALE = ("fp8", "fp8_per_tensor")
"""Kinds whose kernels divide the numbers between the layers by the largest of all tokens."""
GPT_OSS = "gpt-oss"
"""With biases, in MXFP4."""
ONLINE = "fp8_per_tensor"
"""vLLM quantizes a plain checkpoint while it loads it."""


def write(folder: Path) -> None:
    """A random Qwen3-MoE of two layers in each form, and the plain one."""
    write_experts(folder / "plain", vocab_size=VOCAB, num_key_value_heads=4)
    plain = load_file(folder / "plain" / "model.safetensors")
    described = json.loads((folder / "plain" / "config.json").read_text())
    for kind in KINDS:
        stored: dict[str, torch.Tensor] = {}
        for number, (name, weight) in enumerate(plain.items()):
            if "layers." in name and name.endswith("proj.weight"):
                # Sizes differ, so that a scale in the wrong place shows.
                layer = name.removesuffix(".weight")
                stored |= stored_as(layer, weight * (1 + number % 7), kind)
            else:
                stored[name] = weight
        (folder / kind).mkdir()
        save_file(stored, folder / kind / "model.safetensors", metadata={"format": "pt"})
        own: dict[str, Any] = {**QUANTIZATION[kind]}
        is_compressed = own["quant_method"] == "compressed-tensors"
        gates = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
        own["ignore" if is_compressed else "modules_to_not_convert"] = ["lm_head", *gates]
        (folder / kind / "config.json").write_text(
            json.dumps({**described, "quantization_config": own})
        )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trees]]:
    folder = tmp_path_factory.mktemp("fp8-experts")
    write(folder)
    with experts_process(folder), triton_blocks_on_cpu(), torch_experts_on_cpu():
        yield {
            **{kind: Trees(folder / kind, dtype="bfloat16") for kind in KINDS},
            PUBLISHED: Trees(write_quantized(folder, PUBLISHED)[0], shards=2, dtype="bfloat16"),
            GPT_OSS: Trees(write_gpt_oss(folder)[0], dtype="bfloat16"),
            ONLINE: Trees(folder / "plain", dtype="bfloat16", quantization=ONLINE),
        }


@pytest.fixture
def memory() -> Iterator[CellMemory]:
    made = cell_memory(PARTS, (1, PARTS), ())
    yield made
    made.close()


def prove(trees: Trees, tree: nn.Module, width: int, rank: int) -> int:
    return prove_experts(tree, trees.replica, width=width, rank_in_group=rank, device=CPU)


@pytest.mark.parametrize("kind", [*KINDS, ONLINE, GPT_OSS])
@pytest.mark.parametrize("width", [2, 4])
def test_ranks_hold_views_and_add_up_to_the_whole(
    loaded: dict[str, Trees], kind: str, width: int
) -> None:
    trees = loaded[kind]
    name, full = next(experts_of(trees.replica))
    x = torch.randn(33, HIDDEN).bfloat16()
    weights, ids = torch.rand(33, EXPERTS).topk(2)
    total = torch.zeros(33, HIDDEN)
    for rank in range(width):
        tree = trees.view(width, rank)
        assert foreign_bytes(tree, trees.replica) == 0
        assert prove(trees, tree, width, rank) == 2
        own = dict(experts_of(tree))[name]
        assert own.w13_weight.dtype in (FP8, torch.uint8)
        for each, param in full.named_parameters():
            view = own.get_parameter(each)
            assert len(view) == len(param) // width
            assert torch.equal(view.view(torch.uint8), param.chunk(width)[rank].view(torch.uint8))
        total += own.forward_modular(x.clone(), weights, ids.int()).float()
    expected = full.forward_modular(x, weights, ids.int()).float()
    error = (total - expected).norm() / expected.norm()
    # Ranks round what lies between the layers by scales of their own.
    assert error < (0.1 if kind in COMMON_SCALE else 5e-3)
    assert expected.norm() > 0.1


@pytest.mark.parametrize("kind", [*KINDS, PUBLISHED, GPT_OSS])
def test_a_tree_is_proved_with_its_experts(loaded: dict[str, Trees], kind: str) -> None:
    trees = loaded[kind]
    tree = trees.view(2, 1)
    own: dict[str, Any] = {"device": CPU, "shards": trees.shards}
    assert prove_tree(tree, trees.replica, width=2, rank_in_group=1, **own)


@pytest.mark.parametrize("kind", [*KINDS, GPT_OSS])
def test_a_kernel_with_scales_of_another_rank_is_refused(
    loaded: dict[str, Trees], kind: str
) -> None:
    trees = loaded[kind]
    tree, other = trees.view(2, 1), trees.view(2, 0)
    name, own = next(experts_of(tree))
    own.quant_method = dict(experts_of(other))[name].quant_method
    with pytest.raises(ViewError, match=f"experts {name} of rank 1 in width 2"):
        prove(trees, tree, 2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_parts_give_what_all_of_them_give(loaded: dict[str, Trees], kind: str) -> None:
    """A kernel of a borrowed part has the scales of that part."""
    trees = loaded[kind]
    with other_process():
        shared = SharedParts(trees, PARTS, PARTS, "ffn")
        built = [shared.tree(rank) for rank in range(PARTS)]
    for rank, tree in enumerate(built):
        own = shared.borrowings[rank]
        own.ring.begin_step()
        borrowed = outputs(tree, own, torch.bfloat16)
        whole = outputs(trees.replica, own, torch.bfloat16)
        assert len(whole) == 2
        for name, out in whole.items():
            error = (borrowed[name] - out).norm() / out.norm()
            assert error < (0.1 if kind in COMMON_SCALE else 5e-3), (rank, name)


@pytest.mark.parametrize(
    ("kind", "borrow"),
    [*((kind, borrow) for kind in KINDS for borrow in ("none", "ffn")), (GPT_OSS, "none")],
)
def test_the_next_process_finds_the_experts(
    loaded: dict[str, Trees], kind: str, borrow: str, memory: CellMemory
) -> None:
    model = Path(loaded[kind].base.model_config.model)
    with other_process(), rank_of_parts(model, 1, dtype="bfloat16") as config:
        stored = load_replica(config, PARTS, PARTS, borrow)
        units = list(units_of(stored)) if borrow == "ffn" else []
        store_part(stored, units, memory, 1)
    with other_process(), rank_of_parts(model, 1, dtype="bfloat16") as config:
        there = find_part(config, loading_plan(config, PARTS, PARTS, borrow), memory, 1)
    assert there is not None
    check_same(there[0], stored)
    again = dict(experts_of(there[0]))
    for name, experts in experts_of(stored):
        given = [output_of(each, torch.bfloat16) for each in (again[name], experts)]
        assert torch.equal(*given), name


def test_a_rank_that_would_borrow_lacks_the_sinks_of_other_heads(loaded: dict[str, Trees]) -> None:
    with other_process():
        shared = SharedParts(loaded[GPT_OSS], PARTS, PARTS, "ffn")
        with pytest.raises(ViewError, match=r"attn.sinks a rank holds a part .*use --borrow none"):
            shared.tree(0)


@pytest.mark.parametrize("kind", [*KINDS, ONLINE, GPT_OSS])
def test_which_experts_share_a_scale_that_depends_on_others(
    loaded: dict[str, Trees], kind: str
) -> None:
    _, full = next(experts_of(loaded[kind].replica))
    assert has_common_scale(full) == (kind in COMMON_SCALE)


def test_kernels_that_pack_experts_are_refused(
    loaded: dict[str, Trees], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, full = next(experts_of(loaded["fp8"].replica))
    check_experts(name, full)
    assert quantized_experts.backend_of(full) is Fp8MoeBackend.TRITON
    monkeypatch.setattr(full.quant_method, "fp8_backend", Fp8MoeBackend.MARLIN)
    with pytest.raises(ViewError, match=r"its experts with MARLIN.*--moe-backend triton"):
        check_experts(name, full)
    monkeypatch.setattr(full, "quant_method", object())
    with pytest.raises(ViewError, match="experts quantized otherwise than to fp8 or MXFP4"):
        check_experts(name, full)

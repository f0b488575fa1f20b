"""Trees of ranks prove themselves on one GPU, for each form of weights, with the kernels of vLLM.

Needs one NVIDIA GPU (fp8: compute capability 8.9 or more) and vLLM's CUDA build. One process stands
for every rank: `python -m pytest -m gpu tests/gpu/test_views.py -s` prints the kernels and times.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from coordinator.protocol.model_support import Holding
from tests.harness.vllm.checkpoints import checkpoint
from tests.harness.vllm.graph_times import microseconds
from tests.harness.vllm.quantized_models import write_quantized
from tests.harness.vllm.trees import Trees, experts_process
from worker.engine.config import choose_kernels
from worker.engine.weights import fp8_blocks
from worker.engine.weights.fp8 import kernel_of
from worker.engine.weights.moe import experts_of
from worker.engine.weights.quantized_experts import backend_of
from worker.engine.weights.selftest import prove_tree
from worker.engine.weights.tree import foreign_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda", 0)
KINDS: dict[str, dict[str, Any]] = {
    "untied": {},
    "qwen3-moe": {},
    "mixtral": {},
    "fp8-block": {},
    "fp8-block-cutlass": {},
    "fp8-block-moe": {},
    "gpt-oss": {},
    "wide": {"quantization": "fp8_per_block"},
    "wide-channels": {"quantization": "fp8_per_channel"},
    "qwen3-moe-tensors": {"quantization": "fp8_per_tensor"},
}
"""Models, and how vLLM quantizes some of them while it loads them.

`fp8-block` computes with vLLM's first choice, DeepGEMM where that is installed.
"""
WIDTH = 2


def model_folder(kind: str, folder: Path) -> Path:
    if kind.startswith("wide"):
        return write_quantized(folder, "fp8-block")[1]
    return checkpoint(kind.removesuffix("-tensors").removesuffix("-cutlass"), folder)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    current_platform.import_kernels()
    init_workspace_manager(DEVICE)
    folder = tmp_path_factory.mktemp("views")
    torch.cuda.set_device(DEVICE)
    with experts_process(folder, DEVICE):
        yield folder


class CudaTrees(Trees):
    """A replica on the GPU, with the kernels that ranks choose."""

    linear_backend: Any = "auto"

    def prepare(self) -> None:
        self.base.kernel_config.linear_backend = self.linear_backend
        choose_kernels(self.base, Holding(WIDTH), torch.cuda.get_device_capability(DEVICE))


class CutlassTrees(CudaTrees):
    """The same, for a user who names CUTLASS, or where DeepGEMM is missing."""

    linear_backend = "cutlass"


def kernels(tree: nn.Module) -> dict[str, str]:
    """The kernel of each layer of the first block, by its last name."""
    found = {
        name.rpartition(".")[2]: type(kernel_of(layer)).__name__
        for name, layer in tree.named_modules()
        if isinstance(layer, LinearBase) and kernel_of(layer) is not None
    }
    backends = [backend_of(experts) for _, experts in experts_of(tree)]
    return {**found, "experts": str(backends[0])} if backends else found


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_a_rank_are_views_that_compute_right(kind: str, process: Path) -> None:
    model = model_folder(kind, process / kind)
    made = CutlassTrees if kind.endswith("-cutlass") else CudaTrees
    trees = made(model, shards=WIDTH, dtype="bfloat16", **KINDS[kind])
    print(kind, "whole", kernels(trees.replica))
    own: dict[str, Any] = {"device": DEVICE, "shards": WIDTH}
    assert prove_tree(trees.replica, trees.replica, width=1, rank_in_group=0, **own)
    for rank in range(WIDTH):
        tree = trees.view(WIDTH, rank)
        assert foreign_bytes(tree, trees.replica) == 0
        assert prove_tree(tree, trees.replica, width=WIDTH, rank_in_group=rank, **own)
        print(kind, f"rank {rank} of {WIDTH}", kernels(tree))


@pytest.mark.parametrize("made", [CudaTrees, CutlassTrees])
def test_a_range_of_inputs_in_blocks_takes_about_as_long_as_a_copy(
    made: type[CudaTrees], process: Path
) -> None:
    """Layers of Qwen3-32B in tp2: a share of the whole beside a layer of its own, as static tp2's.

    Prints the times; weights stay in the cache here, as in no model.
    """
    model = write_quantized(process / f"times-{made.linear_backend}", "fp8-block")[0]
    trees = made(model, shards=WIDTH, dtype="bfloat16")
    tree = trees.view(WIDTH, 1)
    rows = [
        (own, source)
        for own, source in zip(tree.modules(), trees.replica.modules(), strict=True)
        if isinstance(own, RowParallelLinear)
    ]
    own, source = rows[0]
    ours, vllms = kernel_of(own), kernel_of(source)
    assert ours is not None
    assert vllms is not None
    for outputs, inputs in ((5120, 4096), (5120, 12800)):
        draw = torch.Generator(DEVICE).manual_seed(outputs + inputs)
        whole = torch.randn((outputs, WIDTH * inputs), generator=draw, device=DEVICE)
        whole = whole.to(torch.float8_e4m3fn)
        scales = torch.rand((outputs // 128, WIDTH * inputs // 128), generator=draw, device=DEVICE)
        by_inputs = scales.t().contiguous()
        half = by_inputs[inputs // 128 :].t()
        packed, packed_scales = whole[:, inputs:].contiguous(), half.contiguous()
        share, layer = nn.Module(), nn.Module()
        for each, weight, factors in ((share, whole[:, inputs:], half),
                                      (layer, packed, packed_scales)):  # fmt: skip
            each.weight = nn.Parameter(weight, requires_grad=False)
            each.weight_scale_inv = nn.Parameter(factors, requires_grad=False)
            each.input_scale = None
        assert fp8_blocks.block_scales(share).data_ptr() == half.data_ptr()
        for tokens in (1, 8, 64, 256, 301, 1024, 8192):
            x = torch.randn((tokens, inputs), generator=draw, device=DEVICE).to(torch.bfloat16)
            runs = [
                partial(ours.apply_weights, share, x, None),
                partial(vllms.apply_weights, layer, x, None),
            ]
            results = [run().float() for run in runs]
            error = float((results[0] - results[1]).norm() / results[1].norm())
            times = [microseconds(run) for run in runs]
            names = [type(each).__name__ for each in (ours, vllms)]
            print(f"{outputs}x{inputs}, {tokens} tokens: us {times} ({names}), error {error:.1e}")
            assert error < 1e-2
            # A wide bound: this only sees that something is very wrong.
            assert times[0] < 4 * times[1] + 20

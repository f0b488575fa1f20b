"""vLLM adapter: a rank's part of the weights as a process before has stored it.

A process that takes a lost one's place builds the same tree without weights and gives each layer
its tensors from the cell's memory (part_store.py), so it reads nothing from the checkpoint.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import structlog
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from comm_pool.cpu.cell_memory import CellMemory
from worker.engine.weights.checksums import checksum, numbers_of
from worker.engine.weights.fp8 import (
    UNPACKED_KERNELS,
    ViewedFp8Method,
    is_quantized,
    kernel_of,
)
from worker.engine.weights.gated import view_gated
from worker.engine.weights.layers import ShardPlan, ViewError, building
from worker.engine.weights.manifest import PartManifest
from worker.engine.weights.moe import is_moe, real_expert_maps
from worker.engine.weights.part_memory import TensorPlace, tensors_of
from worker.engine.weights.part_store import Memory, StoredPart, rest_memory, sums_of, unit_memory
from worker.engine.weights.tree import check_viewable

log = structlog.get_logger()

CPU, META = torch.device("cpu"), torch.device("meta")


def find_part(
    config: VllmConfig, plan: ShardPlan, memory: CellMemory, rank: int
) -> tuple[nn.Module, StoredPart] | None:
    """Return the tree of a rank's part over stored tensors; None if they are not complete.

    `config` and `plan` are those that the part was loaded with, and so is the rank's place in
    vLLM's active tp group. Tensors that have changed since count as not complete.

    Raises:
        ViewError: if the tree lacks a layer or has a tensor that was not stored.
    """
    manifest = PartManifest.load(memory, rank)
    if manifest is None:
        return None
    own = unit_memory(memory, rank, manifest.layouts, is_own=True)
    rest = rest_memory(memory, rank, manifest.rest_bytes)
    if (name := _changed(manifest, own, rest)) is not None:
        log.warning("part_changed", rank=rank, unit=name, instead="the checkpoint is read")
        return None
    tree = _tree_without_weights(config, plan)
    _bind(tree, manifest, own, rest)
    check_viewable(tree)
    view_gated(tree)
    return tree.eval(), StoredPart(manifest, own)


def _changed(manifest: PartManifest, own: Memory, rest: torch.Tensor) -> str | None:
    """Return the first unit whose memory is not as it was stored, or "rest"; None if all is."""
    for unit, sums in zip(manifest.units, sums_of(manifest.layouts, own), strict=True):
        if unit.sums != sums:
            return unit.name
    return None if numbers_of([checksum(rest)]) == [manifest.rest_sum] else "rest"


def _tree_without_weights(config: VllmConfig, plan: ShardPlan) -> nn.Module:
    """Build the tree on meta, with the kernels that it has after loading."""
    model_config = config.model_config
    with (
        building(plan),
        real_expert_maps(CPU),
        set_default_torch_dtype(model_config.dtype),
        META,
    ):
        tree = initialize_model(vllm_config=config, model_config=model_config)
    for name, module in tree.named_modules():
        if is_quantized(module):
            kernel = kernel_of(module)
            if kernel is None or type(kernel) not in UNPACKED_KERNELS:
                raise ViewError(f"layer {name} has no kernel for weights that were processed.")
            if hasattr(kernel, "logical_output_size"):
                kernel.logical_output_size = module.output_size_per_partition
            module.quant_method = ViewedFp8Method(kernel)
        elif isinstance(module, Attention):
            module.quant_method = None  # It would read scales that loading has consumed.
    # Experts are stored in their kernel's order.
    with weights_already_processed() if is_moe(config) else nullcontext():
        process_weights_after_loading(tree, model_config, META)
    return tree


def _bind(tree: nn.Module, manifest: PartManifest, own: Memory, rest: torch.Tensor) -> None:
    """Give all layers their tensors, and what loading has left in place of others."""
    modules = dict(tree.named_modules())
    for module in modules.values():
        # Loading may have replaced parameters by others.
        module._parameters.clear()
    shared: dict[tuple[object, ...], torch.Tensor] = {}
    for path, place, raw in _places(manifest, own, rest):
        tensor = _view(place, raw)
        if place.holder == "_parameters":
            tensor = nn.Parameter(tensor, requires_grad=False)
        # Tied layers have one tensor, not two of the same memory.
        key = place.holder, tensor.data_ptr(), place.dtype, place.shape, place.stride
        if tensor.numel():
            tensor = shared.setdefault(key, tensor)
        _put(modules, path, place.holder, place.name, tensor)
    for plain in manifest.plain:
        _put(modules, plain.module, plain.holder, plain.name, plain.value)
    for path, module in modules.items():
        for _, name, tensor in tensors_of(module):
            if tensor.is_meta:
                raise ViewError(f"the tensor {name} of layer {path} was not stored.")


def _places(
    manifest: PartManifest, own: Memory, rest: torch.Tensor
) -> Iterator[tuple[str, TensorPlace, torch.Tensor]]:
    """Yield (path of the module, place, memory) of all tensors."""
    for unit, raw in zip(manifest.units, own, strict=True):
        for place in unit.layout.places:
            yield f"{unit.name}.{place.layer}".rstrip("."), place, raw
    for place in manifest.rest:
        yield place.layer, place, rest


def _view(place: TensorPlace, raw: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory; an empty one has none."""
    return torch.empty(place.shape, dtype=place.dtype) if 0 in place.shape else place.view(raw)


def _put(modules: dict[str, nn.Module], path: str, holder: str, name: str, value: object) -> None:
    if (module := modules.get(path)) is None:
        raise ViewError(f"tensors of layer {path} were stored, but the model has no such layer.")
    (getattr(module, holder) if holder else vars(module))[name] = value

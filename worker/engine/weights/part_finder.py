"""vLLM adapter: a rank's replica, or its part of the weights, as a process before has stored it.

A process that takes a lost one's place builds the same tree without weights and gives each layer
its tensors from the cell's memory (part_store.py), so it reads nothing from the checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from comm_pool.cpu.cell_memory import CellMemory
from worker.engine.weights.checksums import checksum, numbers_of
from worker.engine.weights.fp8 import ViewedFp8Method, is_quantized, kernel_of
from worker.engine.weights.gated import view_gated
from worker.engine.weights.layers import ShardPlan, ViewError, building
from worker.engine.weights.manifest import PartManifest
from worker.engine.weights.moe import is_moe, mark_experts, real_expert_maps
from worker.engine.weights.outcomes import Outcomes, check_outcomes, outcomes_of
from worker.engine.weights.packed import is_packed, process_empty
from worker.engine.weights.part_memory import TensorPlace, tensors_of
from worker.engine.weights.part_store import Memory, StoredPart, rest_memory, sums_of, unit_memory
from worker.engine.weights.quantized_experts import (
    keeps_scales,
    make_kernels,
    unprocessed_experts,
)
from worker.engine.weights.tree import check_viewable

log = structlog.get_logger()

CPU, META = torch.device("cpu"), torch.device("meta")


def find_part(
    config: VllmConfig,
    plan: ShardPlan,
    memory: CellMemory,
    rank: int,
    compute: Callable[[nn.Module], Outcomes] = outcomes_of,
    map_rest: Callable[[int], torch.Tensor] | None = None,
) -> tuple[nn.Module, StoredPart] | None:
    """Return the tree of a rank's part or replica over stored tensors; None if they lack some.

    `config` and `plan` are those that it was loaded with, and so are the rank's place in vLLM's
    active tp group and what it must `compute` as before. Tensors that have changed since count as
    lacking. `map_rest` maps memory of this size, in bytes, that is not the cell's.

    Raises:
        ViewError: if the tree lacks a layer, has a tensor that was not stored, or computes
            something else.
    """
    manifest = PartManifest.load(memory, rank)
    if manifest is None:
        return None
    own = unit_memory(memory, rank, manifest.layouts, is_own=True)
    if map_rest is None:
        rest = rest_memory(memory, rank, manifest.rest_bytes)
    else:
        rest = map_rest(manifest.rest_bytes)
    if (name := _changed(manifest, own, rest)) is not None:
        log.warning("part_changed", rank=rank, unit=name, instead="the checkpoint is read")
        return None
    with _no_cached_ropes():
        tree = _tree_without_weights(config, plan)
        _bind(tree, manifest, own, rest)
        check_viewable(tree, plan.shards)
        view_gated(tree)
        check_outcomes(compute(tree.eval()), manifest.outcomes, rest.device)
    return tree, StoredPart(manifest, own)


@contextmanager
def _no_cached_ropes() -> Iterator[None]:
    """After a failure, let no other tree get this one's rotary modules, which lack numbers."""
    try:
        yield
    except BaseException:
        _ROPE_DICT.clear()
        raise


def _changed(manifest: PartManifest, own: Memory, rest: torch.Tensor) -> str | None:
    """Return the first unit whose memory is not as it was stored, or "rest"; None if all is."""
    for unit, sums in zip(manifest.units, sums_of(manifest.layouts, own), strict=True):
        if unit.sums != sums:
            return unit.name
    return None if numbers_of([checksum(rest)]) == [manifest.rest_sum] else "rest"


def _tree_without_weights(config: VllmConfig, plan: ShardPlan) -> nn.Module:
    """Build the tree on meta, with the kernels that it has after loading.

    Raises:
        ViewError: if vLLM cannot build it so.
    """
    model_config = config.model_config
    try:
        with (
            building(plan),
            real_expert_maps(CPU),
            set_default_torch_dtype(model_config.dtype),
            META,
        ):
            tree = initialize_model(vllm_config=config, model_config=model_config)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ViewError(f"vLLM cannot build the model without weights ({error}).") from error
    mark_experts(tree, unviewed=plan.unviewed)
    methods = {}
    for name, module in tree.named_modules():
        if is_packed(module):
            process_empty(name, module)
            methods[module], module.quant_method = module.quant_method, None
        elif is_quantized(module):
            kernel = kernel_of(module)
            assert kernel is not None, "the layer is not packed."
            if hasattr(kernel, "logical_output_size"):
                kernel.logical_output_size = module.output_size_per_partition
            module.quant_method = ViewedFp8Method(kernel)
        elif isinstance(module, Attention):
            module.quant_method = None  # It would read scales that loading has consumed.
        elif keeps_scales(module):
            raise ViewError(f"layer {name} has quantized experts, whose kernel keeps their scales.")
    with unprocessed_experts(tree, is_moe=is_moe(config)):
        process_weights_after_loading(tree, model_config, META)
    for layer, method in methods.items():
        layer.quant_method = method
    return tree


def _bind(tree: nn.Module, manifest: PartManifest, own: Memory, rest: torch.Tensor) -> None:
    """Give all layers their tensors, and what loading has left in place of others."""
    modules = dict(tree.named_modules())
    built = [
        (module, holder, name, tensor)
        for module in modules.values()
        for holder, name, tensor in _held_by(module)
    ]
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
    make_kernels(modules.values())
    for path, module in modules.items():
        for _, name, tensor in tensors_of(module):
            if tensor.is_meta:
                raise ViewError(f"the tensor {name} of layer {path} was not stored.")
    now = {
        id(tensor): (getattr(module, holder) if holder else vars(module)).get(name)
        for module, holder, name, tensor in built
    }
    for path, module in modules.items():
        for helper in vars(module).values():
            _bind_helper(path, helper, now, set())


def _held_by(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (holder, name, tensor) like `tensors_of`, but the very object that others may hold."""
    for holder, name, _ in tensors_of(module):
        yield holder, name, (getattr(module, holder) if holder else vars(module))[name]


def _bind_helper(path: str, helper: object, now: Mapping[int, object], visited: set[int]) -> None:
    """Give vLLM's helpers of a module, such as kernels and routers, the tensors stored for it.

    `now` has what a module holds by the identity of what it held on meta.

    Raises:
        ViewError: if a helper has a tensor that no module has.
    """
    kind = type(helper)
    if isinstance(helper, (torch.Tensor, nn.Module, type)) or id(helper) in visited:
        return
    if not kind.__module__.startswith("vllm.") or kind.__module__.startswith("vllm.config"):
        return
    visited.add(id(helper))
    for name, value in list(getattr(helper, "__dict__", {}).items()):
        if not isinstance(value, torch.Tensor):
            _bind_helper(path, value, now, visited)
        elif id(value) in now:
            # Some are frozen.
            object.__setattr__(helper, name, now[id(value)])
        elif value.is_meta:
            raise ViewError(f"the tensor {name} of a {kind.__name__} in {path} was not stored.")


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
    if 0 in place.shape:
        return torch.empty(place.shape, dtype=place.dtype, device=raw.device)
    return place.view(raw)


def _put(modules: dict[str, nn.Module], path: str, holder: str, name: str, value: object) -> None:
    if (module := modules.get(path)) is None:
        raise ViewError(f"tensors of layer {path} were stored, but the model has no such layer.")
    (getattr(module, holder) if holder else vars(module))[name] = value

"""vLLM adapter: experts in fp8 and MXFP4, whose kernels are made anew for each range of them.

A range of whole experts is one piece of each tensor in any form that keeps experts apart, also of
their scales. But vLLM's kernel of quantized experts holds scales and biases itself, from the moment
that it processes the weights. So a tree leaves processing out, takes its range of what the
replica's layer has, and makes a kernel of that, as vLLM does at the end of its processing.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_kernel
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
    Mxfp4MoeBackend,
    make_mxfp4_moe_kernel,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.utils import weights_already_processed

from worker.engine.weights.fp8 import adopt_attributes
from worker.engine.weights.layers import ViewError, own_range

Backend: TypeAlias = Fp8MoeBackend | Mxfp4MoeBackend

PLAIN_BACKENDS: tuple[Backend, ...] = (
    *(Fp8MoeBackend.TRITON, Fp8MoeBackend.DEEPGEMM, Fp8MoeBackend.VLLM_CUTLASS),
    *(Mxfp4MoeBackend.MARLIN, Mxfp4MoeBackend.EMULATION),
)
"""vLLM's backends that keep all that they need in tensors of the layer, expert by expert."""


def backend_of(experts: nn.Module) -> Backend | None:
    """Return the backend of quantized experts; None if they are not quantized so."""
    method = getattr(experts, "quant_method", None)
    for name in ("fp8_backend", "mxfp4_backend"):
        found = getattr(method, name, None)
        if isinstance(found, (Fp8MoeBackend, Mxfp4MoeBackend)):
            return found
    return None


def keeps_scales(layer: nn.Module) -> bool:
    """Return whether a layer has quantized experts whose kernel alone has what it computes with."""
    is_plain = isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
    is_known = is_plain or backend_of(layer) in PLAIN_BACKENDS
    return isinstance(layer, RoutedExperts) and not is_known


def has_common_scale(experts: RoutedExperts) -> bool:
    """Return whether experts quantize what lies between their layers by one scale for all tokens.

    It is the largest number of all of them, so it depends on which experts compute.
    """
    described = getattr(experts.quant_method, "moe_quant_config", None)
    if not isinstance(backend_of(experts), Fp8MoeBackend) or described is None:
        return False
    is_one = not described.per_act_token_quant and described.block_shape is None
    return is_one and described.a2_scale is None


def check_quantized_experts(name: str, experts: RoutedExperts) -> None:
    """Refuse quantized experts whose kernel has another form of weights.

    Raises:
        ViewError: with the layer's name and what to choose.
    """
    backend = backend_of(experts)
    if backend not in PLAIN_BACKENDS:
        assert backend is not None, "they are quantized."
        instead = "triton" if isinstance(backend, Fp8MoeBackend) else "marlin"
        raise ViewError(
            f"layer {name} computes its experts with {backend.value}, whose form of weights cannot "
            f"be viewed per rank: serve with --moe-backend {instead}."
        )


def bind_quantized_experts(
    name: str, own: RoutedExperts, full: RoutedExperts, width: int, rank: int
) -> None:
    """Make a rank's experts views of the replica's, or of the part that has them, with a kernel.

    Raises:
        ViewError: if a tensor is not one range of whole experts.
    """
    held = full.local_num_experts
    own._parameters.clear()
    for each, param in full._parameters.items():
        view = None if param is None else param.data
        if view is not None and view.dim() and len(view) == held > own.local_num_experts:
            view = own_range(view, 0, width, rank, own.local_num_experts)
            if len(view) != own.local_num_experts:
                raise ViewError(
                    f"{name}.{each} is not one range of whole experts in width {width}: leave this "
                    "width out of --widths, and please report it."
                )
        own._parameters[each] = None if view is None else nn.Parameter(view, requires_grad=False)
    adopt_attributes(own, full)
    make_kernel(own)


def make_kernels(layers: Iterable[nn.Module]) -> None:
    """Do so for all quantized experts among these layers."""
    for layer in layers:
        if backend_of(layer) is not None:
            make_kernel(layer)


def make_kernel(experts: Any) -> None:
    """Give quantized experts a method of their own, with a kernel of the tensors they have now.

    Raises:
        ValueError: from vLLM, if the backend cannot compute this layer.
    """
    experts.quant_method = method = copy.copy(experts.quant_method)
    method.moe_quant_config = method.get_fused_moe_quant_config(experts)
    own: dict[str, Any] = {
        "moe_quant_config": method.moe_quant_config,
        "moe_config": method.moe,
        "experts_cls": method.experts_cls,
        "routing_tables": experts._expert_routing_tables(),
    }
    if isinstance(backend_of(experts), Fp8MoeBackend):
        method.moe_kernel = make_fp8_moe_kernel(fp8_backend=method.fp8_backend, **own)
        return
    method.moe_kernel = make_mxfp4_moe_kernel(mxfp4_backend=method.mxfp4_backend, **own)
    method.moe_kernel.fused_experts.process_weights_after_loading(experts)


@contextmanager
def unprocessed_experts(tree: nn.Module, *, is_moe: bool) -> Iterator[None]:
    """Let vLLM's processing inside leave experts on meta in the order of their kernel.

    The loaded ones have that order already. Quantized ones are kept away from it.
    """
    methods: dict[Any, Any] = {
        each: each.quant_method for each in tree.modules() if backend_of(each) is not None
    }
    for each in methods:
        each.quant_method = None
    try:
        with weights_already_processed() if is_moe else nullcontext():
            yield
    finally:
        for each, method in methods.items():
            each.quant_method = method

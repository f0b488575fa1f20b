"""vLLM adapter: experts of Qwen3-MoE and Mixtral, viewed per rank as one range of whole experts.

In tp of width k, rank r holds experts r·E/k … (r+1)·E/k - 1 and computes their share of every
token; vLLM's own all-reduce sums over the ranks. A range of whole experts is one piece of memory in
any kernel's weight order, so nothing is copied (docs/adr/0016 says why not a slice of every
expert). In dp and in sp a rank computes with all experts.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from coordinator.protocol.model_support import experts_refusal
from worker.engine.weights.expert_tilings import tune_ranges_of
from worker.engine.weights.layers import ViewError, own_range
from worker.engine.weights.quantized_experts import (
    backend_of,
    bind_quantized_experts,
    check_quantized_experts,
    has_common_scale,
)

PROOF_TOKENS = (8, 256)
"""Tokens of the two proofs of a rank's experts: few and many."""

PROOF_ERROR_MAX = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest error of any token relative to the typical one: kernels sum in different orders."""

COMMON_SCALE_ERROR_MAX = 0.5
"""The same where all tokens' numbers within a layer share a scale that depends on the others.

A rank has no numbers of other ranks' experts, so it rounds its own by another scale. Numbers of
other experts are off by more than 1.
"""


@RoutedExperts.register_oot
class RankedExperts(RoutedExperts):
    """vLLM's experts; the CPU kernel takes no expert map, so others' experts get weight zero."""

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        """(T, hidden) and (T, top_k) weights and experts -> (T, hidden), this rank's part."""
        if x.device.type == "cpu" and self._expert_map is not None:
            local = self._expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0)
            topk_ids = local.clamp_min(0).to(topk_ids.dtype)
        return super().forward_modular(x, topk_weights, topk_ids, *rest, **named)


# compressed-tensors checkpoints select experts by whether their class name contains this.
RankedExperts.__name__ += RoutedExperts.__name__


@GateLinear.register_oot
class PlainGate(GateLinear):
    """A router's gate that keeps its weight: packed by vLLM's CPU backend, no memory holds it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cpu_skip_gemm_dispatch = True


def is_moe(config: VllmConfig) -> bool:
    """Return whether vLLM treats the model as one with experts."""
    return bool(config.model_config.is_moe)


def experts_of(model: nn.Module) -> Iterator[tuple[str, RoutedExperts]]:
    """Yield name and experts of each layer that has some."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield name, module


def mark_experts(model: nn.Module, *, unviewed: bool) -> None:
    """Note on all experts whether they are as vLLM's own ranks have them.

    A model may have a class of its own for them, which does not know of ranks that share weights.
    """
    for _, experts in experts_of(model):
        experts.unviewed = unviewed


def check_experts(name: str, experts: RoutedExperts) -> None:
    """Refuse experts whose memory is unknown to us."""
    method = experts.quant_method
    if backend_of(experts) is not None:
        check_quantized_experts(name, experts)
    elif not isinstance(method, UnquantizedFusedMoEMethod):
        raise ViewError(
            f"layer {name} has experts quantized otherwise than to fp8 or MXFP4, which cannot be "
            "viewed per rank yet: serve a checkpoint of bf16 or fp8."
        )
    if method.is_monolithic:
        raise ViewError(
            f"layer {name} routes inside its kernel, which takes a rank's experts for all of them: "
            "serve with --moe-backend triton."
        )


def check_expert_count(config: VllmConfig, width: int) -> None:
    """Refuse a width that does not divide the experts evenly."""
    if not is_moe(config):
        return
    sentence = experts_refusal(config.model_config.get_num_experts(), width)
    if sentence is not None:
        raise ViewError(sentence)


def is_shared(module: nn.Module) -> bool:
    """Return whether a tp tree uses the replica's module itself: a router's gate is not split."""
    return isinstance(module, GateLinear)


def bind_experts(name: str, own: RoutedExperts, full: RoutedExperts, width: int, rank: int) -> None:
    """Make a rank's experts views of the replica's, or of the part that contains them."""
    tune_ranges_of(full.global_num_experts)
    if backend_of(full) is not None:
        bind_quantized_experts(name, own, full, width, rank)
        return
    if own._parameters.get("w13_bias") is not None and current_platform.is_cpu():
        # vLLM's kernel ends the process.
        raise ViewError(
            f"layer {name} has experts with biases, of which vLLM's CPU kernel computes all or "
            "none: use --widths 1, or serve on CUDA."
        )
    for param_name, param in list(own._parameters.items()):
        if param is None:
            continue
        view = full._parameters[param_name].data
        if view.shape != param.shape:
            view = own_range(view, 0, width, rank, own.local_num_experts)
        if view.shape != param.shape:
            raise ViewError(
                f"{name}.{param_name} is not one range of whole experts in width {width}: leave "
                "this width out of --widths, and please report it."
            )
        own._parameters[param_name] = made = nn.Parameter(view, requires_grad=False)
        _give_kernel(own, param, made)


def _give_kernel(experts: RoutedExperts, old: nn.Parameter, view: nn.Parameter) -> None:
    """Replace a parameter that the experts' kernel has been built with, such as their biases."""
    described = getattr(experts.quant_method, "moe_quant_config", None)
    for each in vars(described).values() if described is not None else ():
        for name, value in list(vars(each).items()) if hasattr(each, "__dict__") else ():
            if value is old:
                setattr(each, name, view)


@contextmanager
def real_expert_maps(device: torch.device) -> Iterator[None]:
    """Put expert maps of trees that are built on meta inside onto `device`.

    vLLM 0.32 reads a map while it builds it, which meta tensors refuse. Its factory can only be
    reached through the name by which it finds the class.
    """
    own = layer.ExpertMapManager

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with device:
            return own(*args, **kwargs)

    layer.ExpertMapManager = on_device
    try:
        yield
    finally:
        layer.ExpertMapManager = own


def experts_shell(full: MoERunner, context: dict[str, nn.Module], mode: str) -> MoERunner:
    """Return a tree's experts under their own name, prefixed with a mode of a step.

    vLLM looks expert layers up by name in the same context as attention, where the plain name
    belongs to the tp tree.
    """
    shell = copy.copy(full)
    shell._modules = dict(full._modules)
    shell.layer_name = f"{mode}.{full.layer_name}"
    context[shell.layer_name] = shell
    return shell


def prove_experts(
    tree: nn.Module, replica: nn.Module, *, width: int, rank_in_group: int, device: torch.device
) -> int:
    """Prove that a rank's experts compute the same as in the replica; return the layers proved.

    Equal layers run the same code on the same shapes, so only the first and the last run, with
    random tokens and experts: first the rank's own ones alone, then all. Raises `ViewError` with
    the layer and its error.
    """
    sources = dict(experts_of(replica))
    found = [each for each in experts_of(tree) if each[1] is not sources[each[0]]]
    proved = dict((*found[:1], *found[-1:]))
    for name, own in proved.items():
        full = sources[name]
        count = full.global_num_experts // width
        for tokens, is_mixed in product(PROOF_TOKENS, (False, True)):
            draw = torch.Generator().manual_seed(tokens)
            x = torch.randn((tokens, full.hidden_size), generator=draw).to(
                device, full.params_dtype
            )
            chance = torch.rand((tokens, full.global_num_experts), generator=draw)
            if not is_mixed:
                chance = chance[:, rank_in_group * count : (rank_in_group + 1) * count]
            weights, ids = chance.topk(min(full.top_k, chance.shape[1]))
            if not is_mixed:
                ids += rank_in_group * count
            ids = ids.to(device, torch.int32)
            weights = weights.to(device)
            is_own = (ids >= rank_in_group * count) & (ids < (rank_in_group + 1) * count)
            with torch.no_grad():
                got = own.forward_modular(x.clone(), weights, ids).float()
                wanted = full.forward_modular(x, weights * is_own, ids).float()
            typical = wanted.norm(dim=1).mean().clamp_min(torch.finfo(torch.float32).tiny)
            error = float(((got - wanted).norm(dim=1) / typical).max())
            limit = PROOF_ERROR_MAX[full.params_dtype]
            if is_mixed and has_common_scale(full):
                limit = COMMON_SCALE_ERROR_MAX
            if not error <= limit:
                raise ViewError(
                    f"self-test: experts {name} of rank {rank_in_group} in width {width} are off "
                    f"by {error:.3g} (relative) with {tokens} tokens: choose another "
                    "--moe-backend, or leave this width out of --widths; and please report it."
                )
    return len(proved)

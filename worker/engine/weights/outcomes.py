"""vLLM adapter: a few numbers of what stored weights compute, and must compute when found again.

A checksum says that the tensors are as they were. What vLLM's loader leaves beside them in Python
objects is made anew by the process that finds them, so results are compared as well.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase

from worker.engine.weights.layers import ViewError, sizes_of
from worker.engine.weights.model_proof import can_prove, logits_of
from worker.engine.weights.packed import is_packed
from worker.engine.weights.part_memory import tensors_of

TRIAL_TOKENS = 8

ERROR_MAX = 1e-3
"""Largest error relative to the typical number: the same kernel computes with the same bits."""

GPU_MODEL_ERROR_MAX = 2e-2
"""The same of a whole model on a GPU.

Some kernels there add in any order, and layers amplify that. Checksums prove the bytes.
"""

Outcomes = Mapping[str, Sequence[float]]
"""What layers compute of fixed input, one number per token, by their path; "" is the model."""


def outcomes_of(tree: nn.Module) -> Outcomes:
    """Return what the packed layers of a tree compute; it communicates nothing.

    Raises:
        ViewError: if one cannot run.
    """
    return {
        name: _summary(_computed(name, layer))
        for name, layer in tree.named_modules()
        if is_packed(layer)
    }


def _computed(name: str, layer: LinearBase) -> torch.Tensor:
    draw = torch.Generator().manual_seed(TRIAL_TOKENS)
    x = torch.randn((TRIAL_TOKENS, sizes_of(layer)[0]), generator=draw)
    x = x.to(next(tensor for *_, tensor in tensors_of(layer)).device)
    try:
        with torch.no_grad():
            out: torch.Tensor = layer.quant_method.apply(layer, x.to(layer.params_dtype), None)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ViewError(f"layer {name} cannot run ({error}).") from error
    return out


def outcomes_of_model(replica: nn.Module, config: VllmConfig, device: torch.device) -> Outcomes:
    """Return the same, and what a replica computes in all; its group of one must be active.

    Raises:
        ViewError: if it cannot compute a step.
    """
    found = dict(outcomes_of(replica))
    if can_prove(config):
        logits = logits_of("the replica", replica, replica, config, device)
        assert logits is not None, "a rank alone has all of them."
        found[""] = _summary(logits)
    return found


def _summary(out: torch.Tensor) -> tuple[float, ...]:
    """Return one number per row of (T, n), on which every item has an influence."""
    draw = torch.Generator().manual_seed(out.shape[1])
    numbers = torch.randn(out.shape[1], generator=draw).to(out.device)
    return tuple((out.float() @ numbers).tolist())


def check_outcomes(found: Outcomes, stored: Outcomes, device: torch.device) -> None:
    """Raise `ViewError` if layers compute something else than when they were stored."""
    of_model = ERROR_MAX if device.type == "cpu" else GPU_MODEL_ERROR_MAX
    if found.keys() != stored.keys():
        raise ViewError("other layers were stored than the model has.")
    for name, numbers in found.items():
        own, wanted = torch.tensor(numbers), torch.tensor(stored[name])
        size = wanted.norm().clamp_min(torch.finfo(torch.float32).tiny)
        error = float((own - wanted).norm() / size)
        if not error <= (ERROR_MAX if name else of_model):
            what = f"layer {name}" if name else "the model"
            raise ViewError(f"{what} computes other numbers than before (off by {error:.3g}).")

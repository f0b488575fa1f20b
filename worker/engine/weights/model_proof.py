"""vLLM adapter: proves at start-up that whole trees compute the logits of the replica.

`selftest` proves each layer. What a model does between its layers is its own code: norms over all
heads, multipliers, biases of the head, collectives. So every tree computes one step of a few tokens
as in service, with a stand-in for attention that needs no KV, and the logits are compared.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from worker.engine.weights.layers import ViewError

TOKENS = 13
"""An odd number, so that shares of the tokens are uneven."""

ERROR_MAX = {torch.float32: 1e-2}
OTHER_ERROR_MAX = 0.5
"""Largest relative error of the typical token, by the type of the weights.

Rounding adds up over the layers, and a token may go to another expert. What is wired wrongly is off
by about 1 in most tokens.
"""


class StepUnprovedError(ViewError):
    """A step of a tree could not be computed, so that its logits are not known."""


def can_prove(config: VllmConfig) -> bool:
    """Return whether a step can run before the runners are ready: not where it is compiled."""
    return config.compilation_config.mode in (None, CompilationMode.NONE)


def logits_of(
    name: str, tree: nn.Module, attending: nn.Module, config: VllmConfig, device: torch.device
) -> torch.Tensor | None:
    """Compute a step of TOKENS tokens; a collective of the tree's group, which must be active.

    `attending` has the tree's attention layers. Returns (TOKENS, vocabulary), or None where vLLM
    gathers logits in another rank alone. Raises `StepUnprovedError` if the model's code fails.
    """
    draw = torch.Generator().manual_seed(TOKENS)
    vocabulary = config.model_config.get_vocab_size()
    tokens = torch.randint(0, vocabulary, (TOKENS,), generator=draw).to(device)
    positions = torch.arange(TOKENS, device=device)
    layers = [each for each in attending.modules() if isinstance(each, Attention)]
    with (
        torch.no_grad(),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=TOKENS),
        _standing_in(layers),
    ):
        try:
            logits: torch.Tensor | None = tree.compute_logits(tree(tokens, positions))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise StepUnprovedError(
                f"self-test: {name} cannot compute a step ({type(error).__name__}: {error}): leave "
                "its width out of --widths, and please report it with the model's config.json."
            ) from error
    return None if logits is None else logits.float()


@contextmanager
def _standing_in(layers: Iterable[Attention]) -> Iterator[None]:
    """Let attention layers compute without KV."""
    layers = list(layers)
    for layer in layers:
        layer.forward = partial(_attend, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _attend(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """(T, heads·dim) -> (T, heads·dim): each token attends to itself and to the one before.

    It depends on every head of q, k and v, and on their positions.
    """
    q = query.reshape(-1, layer.num_heads, layer.head_size)
    k = key.reshape(-1, layer.num_kv_heads, layer.head_size)
    v = value.reshape(-1, layer.num_kv_heads, layer.head_size_v)
    group = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.zeros_like(v)
    for back in (0, 1):
        keys, values = k.roll(back, 0), v.roll(back, 0)
        weight = (q.float() * keys.float()).sum(-1, keepdim=True) * layer.head_size**-0.5
        out += (torch.tanh(weight) * values.float()).to(out.dtype)
    return out.flatten(1)


def compare(
    name: str, logits: torch.Tensor | None, wanted: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Raise `ViewError` if a tree's logits are not those of the replica, of weights of a type."""
    if logits is None or wanted is None:
        return
    size = wanted.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    error = float(((logits - wanted).norm(dim=1) / size).median())
    if not error <= ERROR_MAX.get(dtype, OTHER_ERROR_MAX):
        raise ViewError(
            f"self-test: {name} computes other logits than all weights together (off by "
            f"{error:.3g}, relative): the model does something between its layers that ranks do "
            "not share. Leave this width out of --widths, and please report it with the model's "
            "config.json."
        )

"""What a test compares of a tree that was stored and the tree that another process finds."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from worker.engine.weights.part_memory import tensors_of
from worker.engine.weights.tree import unbound_tensor, weight_bytes

Tensors = dict[tuple[str, str, str], torch.Tensor]


def end_process() -> None:
    """Let the trees built next share no module with those before: they are of another process."""
    _ROPE_DICT.clear()


@contextmanager
def other_process() -> Iterator[None]:
    """Let the trees built inside share no module with those before and after."""
    own = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(own)


def tensors(tree: nn.Module) -> Tensors:
    """Every tensor of a tree by module, holder and name."""
    return {
        (path, holder, name): tensor
        for path, module in tree.named_modules()
        for holder, name, tensor in tensors_of(module)
    }


def check_same(found: nn.Module, stored: nn.Module) -> None:
    """Every tensor is there, with its type, strides and bits, and takes the same memory."""
    assert unbound_tensor(found) is None
    before, again = tensors(stored), tensors(found)
    assert before.keys() == again.keys()
    for place, tensor in before.items():
        assert again[place].dtype == tensor.dtype, place
        assert again[place].stride() == tensor.stride(), place
        bytes_of = [each.contiguous().view(-1).view(torch.uint8) for each in (tensor, again[place])]
        assert torch.equal(*bytes_of), place
    assert weight_bytes(found) == weight_bytes(stored)
    assert dict(stored.named_parameters()).keys() == dict(found.named_parameters()).keys()

"""vLLM adapter: layers that a kernel of vLLM's has processed, over tensors of a process before.

Processing leaves more than tensors: what a kernel is called with, and names of its own. A layer
gets that by processing weights of zeros, one layer at a time, and then its tensors from memory.
Whether it computes what the stored one did is another matter (outcomes.py): a kernel may keep
weights elsewhere.
"""

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from worker.engine.weights.fp8 import PLAIN_KERNELS, is_quantized, kernel_of
from worker.engine.weights.layers import ViewError
from worker.engine.weights.part_memory import tensors_of


def is_packed(layer: nn.Module) -> bool:
    """Return whether a linear layer computes with a kernel whose form of weights is vLLM's own."""
    return is_quantized(layer) and type(kernel_of(layer)) not in PLAIN_KERNELS


def process_empty(name: str, layer: nn.Module) -> None:
    """Give a layer on meta all that processing leaves on it; its tensors stay on meta.

    Raises:
        ViewError: if vLLM's code refuses weights of zeros.
    """
    for params in (layer._parameters, layer._buffers):
        for each, param in params.items():
            if param is not None and param.is_meta:
                params[each] = materialize_meta_tensor(param).zero_()
    try:
        with torch.no_grad():
            layer.quant_method.process_weights_after_loading(layer)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ViewError(f"layer {name} cannot be made without its weights ({error}).") from error
    for holder, each, tensor in tensors_of(layer):
        empty = torch.empty_like(tensor, device="meta")
        if holder == "_parameters":
            layer._parameters[each] = nn.Parameter(empty, requires_grad=False)
        else:
            (getattr(layer, holder) if holder else vars(layer))[each] = empty

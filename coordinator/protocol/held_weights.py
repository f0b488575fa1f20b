"""The bytes of weights that one rank holds, by how the cell divides them. From config.json. Pure.

Ranks hold all weights (one part), or one of several parts: of the feed-forward layers (`ffn`), or
of all linear layers and the lm_head (`none`, `all`; with `all` also of the token embeddings). Ranks
that borrow have a ring besides, the memory into which they copy the parts of others
(worker/engine/weights/lending.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from comm_pool.loans import spread_whole
from coordinator.protocol.engine_options import GivenOption, last_value
from coordinator.protocol.model_size import ModelSize, model_size
from coordinator.protocol.stored_quantization import (
    COMPRESSED,
    MXFP4_QUANTIZATIONS,
    StoredQuantization,
    object_of,
    stored_quantization,
)

Borrow = Literal["none", "ffn", "all"]

FOUR_BYTES = ("float32", "float")
"""vLLM's names of the type of four bytes; all other types of weights have two."""
KV_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1}
"""vLLM's names of types of the KV cache that can be served, beside that of the weights."""
GROUP_BITS = 20
"""Bits of a scale (16) and a zero (4) of one group of AWQ or GPTQ."""
GROUP_DEFAULT = 128
"""Weights in such a group where the checkpoint does not say."""
_BITS = {"nvfp4": 4.5, "bitsandbytes": 4.5, "fp8": 8.0, "fbgemm_fp8": 8.0}
_BITS |= dict.fromkeys(MXFP4_QUANTIZATIONS, 4.25)
"""Quantization -> bits of a weight, with its scales."""
MARLIN_MULTIPLES = (256, 128)
"""What Marlin pads the hidden size and the inner size of experts in MXFP4 to multiples of."""
_GROUPED = ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round")


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of an element once it is loaded."""

    linear: float
    """Of linear layers, which a quantization makes smaller."""
    other: int
    """Of embeddings, lm_head and norms."""
    kv: int
    """Of the KV cache."""
    experts: float
    """Of experts, with the padding that their kernel wants."""


def element_bytes(
    config: Mapping[str, Any], options: Sequence[GivenOption] = (), *, in_files: bool = False
) -> ElementBytes:
    """Return the bytes that vLLM gives to elements, by its options and the checkpoint.

    `in_files`: what they take in the checkpoint instead, without the padding of kernels. Without
    `--dtype` vLLM loads float32 checkpoints in a type of two bytes as well.
    """
    other = 4 if (last_value(options, "--dtype") or "auto") in FOUR_BYTES else 2
    stored = stored_quantization(config, last_value(options, "--quantization"))
    bits = _quantized_bits(stored) if stored is not None and stored.has_weights else None
    linear = experts = other if bits is None else bits / 8
    if stored is not None and stored.method.lower() in MXFP4_QUANTIZATIONS:
        linear, experts = other, experts * (1.0 if in_files else _padding(config))
    usual = KV_BYTES["fp8"] if stored is not None and stored.kv == "fp8" else other
    kv = KV_BYTES.get(last_value(options, "--kv-cache-dtype") or "auto", usual)
    return ElementBytes(linear, other, kv, experts)


def _padding(config: Mapping[str, Any]) -> float:
    """Return by what factor vLLM's Marlin kernel makes experts in MXFP4 larger."""
    size = model_size(config)
    if size is None or not size.experts:
        return 1.0
    sizes = size.hidden, size.inner // size.experts
    return math.prod(
        -(-each // multiple) * multiple / each
        for each, multiple in zip(sizes, MARLIN_MULTIPLES, strict=True)
    )


def _quantized_bits(stored: StoredQuantization) -> float:
    """Return the bits of a quantized weight."""
    name, fields = stored.method.lower(), stored.fields
    if name in _GROUPED:
        bits = int(fields.get("bits") or fields.get("w_bit") or 4)
        group = int(fields.get("group_size") or GROUP_DEFAULT)
        return bits + GROUP_BITS / (group if group > 0 else GROUP_DEFAULT)
    if name == COMPRESSED:
        return _compressed_bits(stored.groups)
    return _BITS.get(name, 8.0)


def _compressed_bits(groups: Mapping[str, Any]) -> float:
    for group in groups.values():
        weights = object_of(object_of(group).get("weights"))
        if weights.get("num_bits"):
            size = weights.get("group_size")
            scales = GROUP_BITS / size if isinstance(size, int) and size > 0 else 0.0
            return float(weights["num_bits"]) + scales
    return 8.0


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The bytes that a rank holds, by what they are for."""

    weights: int
    ring: int
    whole_layers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.ring + self.whole_layers


def held_bytes(
    size: ModelSize,
    element: ElementBytes,
    parts: int = 1,
    borrow: Borrow = "ffn",
    whole_layers: int = 0,
) -> HeldBytes:
    """Return what a rank holds of a model in `parts` parts, of which `borrow` says what is divided.

    It holds `whole_layers` layers whole, none of them if it borrows nothing.
    """
    if parts == 1:
        feed_forward = _feed_forward_bytes(size, element)
        return HeldBytes(_bytes(size, element, size.attention, feed_forward, 1, 1), 0, 0)
    feed_forward = _feed_forward_bytes(size, element) / parts
    if borrow == "ffn":
        weights = _bytes(size, element, size.attention, feed_forward, 1, 1)
    else:
        heads = max(1, size.kv_heads // parts) * parts / size.kv_heads
        kv = 2 * size.hidden * size.head_dim * size.kv_heads * size.layers
        attention = (size.attention - kv + kv * heads) / parts
        in_parts = 1 if borrow == "none" else parts
        weights = _bytes(size, element, attention, feed_forward, in_parts, parts)
    if borrow == "none":
        return HeldBytes(weights, 0, 0)
    units = list(_unit_kinds(size, element, parts, borrow))
    ring = sum(unit * min(parts, count * (parts - 1)) for unit, count in units)
    return HeldBytes(
        weights,
        int(ring),
        _whole_bytes(size, element, parts, borrow, min(whole_layers, size.layers)),
    )


def _bytes(
    size: ModelSize,
    element: ElementBytes,
    attention: float,
    feed_forward_bytes: float,
    embedding_parts: int,
    lm_head_parts: int,
) -> int:
    others = size.embeddings / embedding_parts + size.lm_head / lm_head_parts
    others += size.small_elements + size.rope_elements
    return int(attention * element.linear + feed_forward_bytes + others * element.other)


def _feed_forward_bytes(size: ModelSize, element: ElementBytes) -> float:
    """Return the bytes of all feed-forward networks and experts."""
    dense_layers = size.layers - size.expert_layers
    return dense_layers * size.dense_elements * element.linear + (
        size.expert_layers * _experts_bytes(size, element)
    )


def _experts_bytes(size: ModelSize, element: ElementBytes) -> float:
    """Return the bytes of the experts of one layer, with those that compute every token."""
    return size.expert_elements * element.experts + size.shared_elements * element.linear


def _unit_kinds(
    size: ModelSize, element: ElementBytes, parts: int, borrow: Borrow
) -> Iterator[tuple[float, int]]:
    """Yield the bytes of the largest loan of each kind that is borrowed, and its layers' number.

    A rank has as many slots for the loans of a kind as there are parts.
    """
    dense_layers = size.layers - size.expert_layers
    networks = dense_layers + (size.expert_layers if size.shared_elements else 0)
    largest = max(size.dense_elements if dense_layers else 0, size.shared_elements)
    if networks:
        yield largest * element.linear / parts, networks
    if size.expert_layers:
        yield size.expert_elements * element.experts / parts, size.expert_layers
    if borrow == "all":
        yield size.qkv_layer * element.linear / parts, size.layers
        yield size.output_layer * element.linear / parts, size.layers


def _whole_bytes(
    size: ModelSize, element: ElementBytes, parts: int, borrow: Borrow, count: int
) -> int:
    """Return the bytes of the parts of others that a rank with `count` whole layers keeps."""
    of_attention = size.qkv_layer + size.output_layer if borrow == "all" else 0
    total = count * of_attention * element.linear
    for layer in spread_whole(size.layers, count):
        has_experts = layer >= size.layers - size.expert_layers
        of_dense = size.dense_elements * element.linear
        total += _experts_bytes(size, element) if has_experts else of_dense
    return int(total * (parts - 1) / parts)

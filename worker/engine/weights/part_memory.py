"""vLLM adapter: the memory of a rank's part of the weights, which its peers can read.

A unit is what a rank borrows as one: the linear layers of a feed-forward network, a linear layer of
an attention, or the experts of a layer, in the order of their use within a step. The lm_head is a
unit too, the last; as it is larger than the others, it is borrowed in pieces. Token embeddings are
the first; as a step needs few of their rows, these are read where they lie. Each unit lies in one
range of memory. Tensors that a borrower copies in every step come first, so one copy moves
them; small ones, such as biases and scales, follow and are copied once. All parts of a unit have
the same layout, whatever vLLM's loader and its kernels made of the weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from worker.engine.weights.layers import ShardMajorMerged, ShardMajorQKV, ViewError, sizes_of
from worker.engine.weights.quantized_experts import keeps_scales

ALIGNMENT_BYTES = 256
"""Alignment of each tensor: what kernels and the copy engine want."""

PIECE_ROWS = 64
"""Rows of a piece of an lm_head come in multiples of this where slots allow: kernels want it."""

RESIDENT_SHARE = 64
"""Tensors below this fraction of a unit's largest one are copied once, at start-up."""


SCRATCH = ("workspace",)
"""Tensors that kernels write: no weights, so all parts of a layer use the rank's own."""

GAPS_MAX = 2
"""Largest ratio of a tensor's memory to its items: kernels pad rows of scales to whole vectors."""

LEAST_BITS = 1
"""Least bits of a weight, whatever its form."""


class UnitKind(StrEnum):
    """What a unit computes, and so how the results of its parts are put together."""

    FEED_FORWARD = "feed-forward"
    QKV = "qkv"
    OUTPUT = "output"
    EXPERTS = "experts"
    LM_HEAD = "lm_head"
    EMBEDDINGS = "embeddings"

    @property
    def is_of_layer(self) -> bool:
        """Whether each layer has units of this kind."""
        return self not in (UnitKind.LM_HEAD, UnitKind.EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class Unit:
    """The layers that a rank borrows as one; `layers` by their path below `name`."""

    name: str
    kind: UnitKind
    layers: Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a layer's tensor lies in a unit's memory, from `offset` bytes on; strides in items."""

    layer: str
    holder: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor in memory with this layout, (bytes,) int8."""
        size = extent_of(self.shape, self.stride) * self.dtype.itemsize
        flat = raw[self.offset : self.offset + size].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next; a single number is its own row."""
        items: int = self.stride[0] if self.stride else 1
        return items * int(self.dtype.itemsize)

    def moved(self, by: int) -> "TensorPlace":
        """Return the same place, `by` bytes further from where the memory begins."""
        return replace(self, offset=self.offset + by)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit's tensors; those before `loan_bytes` are copied in every step, the rest once."""

    places: tuple[TensorPlace, ...]
    loan_bytes: int
    num_bytes: int
    pieces: tuple[range, ...]
    """The bytes of each loan, in order: of all units but the lm_head one loan brings all."""

    def places_in(self, piece: range) -> tuple[TensorPlace, ...]:
        """Return the tensors that a loan brings, as they lie in its slot: whole, or rows of one."""
        if len(self.pieces) == 1:
            return tuple(place for place in self.places if place.offset < self.loan_bytes)
        (place,) = self.places
        rows = len(piece) // place.row_bytes
        return (replace(place, shape=(rows, *place.shape[1:]), offset=0),)

    def first_row(self, piece: range) -> int:
        """Return the first row of its tensor that a piece holds."""
        return piece.start // self.places[0].row_bytes


def units_of(part: nn.Module) -> Iterator[Unit]:
    """Yield the units of which a loaded tree holds one of several parts, in order of use."""
    inside = ""
    for name, module in part.named_modules():
        if inside and name.startswith(inside):
            continue
        parted = {path: child for path, child in module.named_children() if is_parted(child)}
        if any(isinstance(child, ShardMajorMerged) for child in parted.values()):
            inside = f"{name}."
            yield Unit(name, UnitKind.FEED_FORWARD, parted)
        elif is_parted(module):
            yield Unit(name, _kind_of(name, module), {"": module})


def is_parted(layer: nn.Module) -> bool:
    """Return whether a loaded layer holds one of several parts."""
    if isinstance(layer, RoutedExperts):
        return bool(layer.local_num_experts < layer.global_num_experts)
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    return isinstance(layer, kinds) and layer.tp_size > 1


def _kind_of(name: str, layer: nn.Module) -> UnitKind:
    for kind, layers in (
        (UnitKind.EXPERTS, RoutedExperts),
        (UnitKind.QKV, ShardMajorQKV),
        (UnitKind.OUTPUT, RowParallelLinear),
        (UnitKind.LM_HEAD, ParallelLMHead),
        (UnitKind.EMBEDDINGS, VocabParallelEmbedding),
    ):
        if isinstance(layer, layers):
            return kind
    raise ViewError(
        f"layer {name} is a {type(layer).__name__}, whose parts cannot be put together: use "
        "--borrow none, and please report it."
    )


def tensors_of(layer: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (holder, name, tensor) of a layer's parameters, buffers and plain attributes."""
    for holder in ("_parameters", "_buffers"):
        for name, tensor in getattr(layer, holder).items():
            if tensor is not None:
                yield holder, name, tensor.data
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            yield "", name, value


def put_tensor(layer: nn.Module, place: TensorPlace, tensor: torch.Tensor) -> None:
    """Give a layer a tensor in the place of its own."""
    if place.holder == "_parameters":
        layer._parameters[place.name] = nn.Parameter(tensor, requires_grad=False)
    elif place.holder:
        layer._buffers[place.name] = tensor
    else:
        setattr(layer, place.name, tensor)


def extent_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of items from the first to the last of a tensor."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def layouts_of(units: Sequence[Unit]) -> tuple[UnitLayout, ...]:
    """Lay all units out; an lm_head in pieces that fit the slots of the largest other unit.

    So the ring does not grow with it. Raises `ViewError` as `layout_of`.
    """
    layouts = [layout_of(unit) for unit in units]
    of_layers = [
        layout.loan_bytes
        for unit, layout in zip(units, layouts, strict=True)
        if unit.kind.is_of_layer
    ]
    return tuple(
        in_pieces(layout, max(of_layers)) if unit.kind is UnitKind.LM_HEAD and of_layers else layout
        for unit, layout in zip(units, layouts, strict=True)
    )


def in_pieces(layout: UnitLayout, slot_bytes: int) -> UnitLayout:
    """Cut a unit of one tensor into the fewest pieces that fit a slot, of about as many rows each.

    A slot of less than a row gets one row at a time.

    Raises:
        ViewError: if the unit has several tensors.
    """
    if len(layout.places) > 1:
        raise ViewError(
            "the lm_head has a bias or a scale beside its weight, and cannot be borrowed in "
            "pieces: use --borrow ffn."
        )
    (place,) = layout.places
    rows, row_bytes = place.shape[0], place.row_bytes
    rows_max = max(1, slot_bytes // row_bytes)
    each = -(-rows // -(-rows // rows_max))
    aligned = -(-each // PIECE_ROWS) * PIECE_ROWS
    each = aligned if aligned <= rows_max else each
    starts = range(0, rows, each)
    pieces = (range(row * row_bytes, min(row + each, rows) * row_bytes) for row in starts)
    return replace(layout, pieces=tuple(pieces))


def layout_of(unit: Unit) -> UnitLayout:
    """Lay a unit's tensors out, the large ones first.

    Raises:
        ViewError: if a tensor's memory is not its own, or a layer's weights are in no tensor.
    """
    found = [
        (name, *each)
        for name, layer in unit.layers.items()
        for each in tensors_of(layer)
        if each[2].numel() and each[1] not in SCRATCH
    ]
    for name, layer in unit.layers.items():
        _check_weights(f"{unit.name}.{name}".rstrip("."), layer)
    largest = max(tensor.nbytes for *_, tensor in found)
    found.sort(key=lambda each: each[3].nbytes * RESIDENT_SHARE < largest)
    places, end, loan_bytes = [], 0, 0
    for layer, holder, name, tensor in found:
        shape, stride = tuple(tensor.shape), tensor.stride()
        extent = extent_of(shape, stride)
        if not tensor.numel() <= extent <= tensor.numel() * GAPS_MAX:
            raise ViewError(
                f"layer {unit.name}.{layer} has a tensor {name} with gaps in its memory, which "
                "peers cannot borrow: use --borrow none, and please report it."
            )
        places.append(TensorPlace(layer, holder, name, tensor.dtype, shape, stride, end))
        end += -(-extent * tensor.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if tensor.nbytes * RESIDENT_SHARE >= largest:
            loan_bytes = end
    return UnitLayout(tuple(places), loan_bytes, end, (range(loan_bytes),))


def _check_weights(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose kernel keeps weights or their scales where no tensor of it has them."""
    if keeps_scales(layer):
        raise ViewError(
            f"layer {name} has quantized experts, whose kernel keeps their scales, so that peers "
            "cannot compute with borrowed ones yet: use --borrow none."
        )
    if not isinstance(layer, LinearBase):
        return
    least = math.prod(sizes_of(layer)) * LEAST_BITS // 8
    if sum(tensor.nbytes for *_, tensor in tensors_of(layer)) < least:
        raise ViewError(
            f"layer {name} keeps its weights inside of {type(layer.quant_method).__name__}, where "
            "peers cannot read them: use --borrow none."
        )


def move_in(unit: Unit, layout: UnitLayout, raw: torch.Tensor) -> None:
    """Copy a unit's tensors into its memory and make the layers use them there."""
    for place in layout.places:
        layer = unit.layers[place.layer]
        held = (getattr(layer, place.holder) if place.holder else vars(layer))[place.name]
        there = place.view(raw)
        there.copy_(held.data)
        # In place: a kernel that has kept the tensor uses it there too, and nobody the old memory.
        held.data = there

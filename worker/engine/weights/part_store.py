"""vLLM adapter: moves what a rank has loaded of the weights into the memory of its cell.

All tensors lie in two pieces of memory that outlive the rank: the units of a part, which peers
read, and the rest, which is all of a replica. The next process of the rank finds them there
(part_finder.py).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from comm_pool.cpu.cell_memory import CellMemory, rest_name, weights_name
from worker.engine.weights.checksums import checksum, numbers_of
from worker.engine.weights.layers import ViewError
from worker.engine.weights.manifest import LentUnit, PartManifest, PlainValue, UnitSums
from worker.engine.weights.outcomes import Outcomes, outcomes_of
from worker.engine.weights.part_memory import (
    ALIGNMENT_BYTES,
    TensorPlace,
    Unit,
    UnitLayout,
    extent_of,
    layouts_of,
    move_in,
    tensors_of,
)

PAGE_BYTES = 4096

ASIDE_BYTES_MAX = 4096
"""A tensor in memory of the host beside a device's weights is a scale, or a few."""

Memory = Sequence[torch.Tensor]
"""The memory of each unit of one rank's part, (bytes,) int8."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rank's own part in the cell's memory: the list of its tensors, and its units' memory."""

    manifest: PartManifest
    units: Memory


@dataclass(frozen=True, slots=True)
class RestMemory:
    """Memory for the tensors outside of units, filled from its beginning on."""

    raw: torch.Tensor
    """All of it, (bytes,) int8."""
    grow: Callable[[int], None] | None = None
    """Called before anything is written up to a byte."""
    keep: Callable[[], None] | None = None
    """Called once all is written, for the next process to find it."""


MakeRest = Callable[[int], RestMemory]
"""Makes memory of this size in bytes."""

_Found = tuple[str, str, str, torch.Tensor]
"""Path of a module, holder, name, and the tensor there."""


def unit_memory(
    memory: CellMemory, rank: int, layouts: Sequence[UnitLayout], *, is_own: bool
) -> Memory:
    """Return the memory of each unit of a rank's part, in the cell's memory."""
    if not layouts:
        return []
    sizes = [_aligned(layout.num_bytes, PAGE_BYTES) for layout in layouts]
    raw = _mapped(memory, weights_name(rank), sum(sizes), is_own=is_own)
    return [
        piece[: layout.num_bytes] for piece, layout in zip(raw.split(sizes), layouts, strict=True)
    ]


def rest_memory(memory: CellMemory, rank: int, num_bytes: int) -> torch.Tensor:
    """Return the memory of a rank's other tensors, (num_bytes,) int8, in the cell's memory."""
    size = _aligned(max(num_bytes, 1), PAGE_BYTES)
    return _mapped(memory, rest_name(rank), size, is_own=True)[:num_bytes]


def _mapped(memory: CellMemory, name: str, num_bytes: int, *, is_own: bool) -> torch.Tensor:
    mapped = memory.map(name, num_bytes, is_own=is_own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is read-only, which is the point
        return torch.frombuffer(mapped, dtype=torch.int8)


def _aligned(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


def sums_of(layouts: Sequence[UnitLayout], own: Memory) -> list[UnitSums]:
    """Return the checksums of units in memory; waits for their device once."""
    sums = iter(
        numbers_of(
            checksum(raw[each.start : each.stop])
            for layout, raw in zip(layouts, own, strict=True)
            for each in (*layout.pieces, range(layout.loan_bytes, layout.num_bytes))
        )
    )
    return [UnitSums(tuple(islice(sums, len(each.pieces))), next(sums)) for each in layouts]


def describe_units(
    units: Sequence[Unit], layouts: Sequence[UnitLayout], own: Memory
) -> tuple[LentUnit, ...]:
    """Return what peers must know of the units in a rank's memory."""
    sums = sums_of(layouts, own)
    return tuple(
        LentUnit(unit.name, layout, each)
        for unit, layout, each in zip(units, layouts, sums, strict=True)
    )


def store_part(
    part: nn.Module,
    units: Sequence[Unit],
    memory: CellMemory,
    rank: int,
    compute: Callable[[nn.Module], Outcomes] = outcomes_of,
    make_rest: MakeRest | None = None,
) -> StoredPart:
    """Move all tensors of a loaded part or replica into the cell's memory, where its layers use it.

    `units` are what peers read, if any do. The next process must `compute` the same. What is no
    unit lies in memory of the cell, or in what `make_rest` makes.

    Raises:
        ViewError: if a unit cannot be laid out, or a tensor lies on another device.
        CellMemoryError: if a process of the rank before had a part of another size.
    """
    PartManifest.withdraw(memory, rank)
    layouts = layouts_of(units)
    own = unit_memory(memory, rank, layouts, is_own=True)
    for unit, layout, raw in zip(units, layouts, own, strict=True):
        move_in(unit, layout, raw)
    in_units = {
        (unit.layers[place.layer], place.holder, place.name)
        for unit, layout in zip(units, layouts, strict=True)
        for place in layout.places
    }
    found = [
        (path, holder, name, tensor)
        for path, module in part.named_modules()
        for holder, name, tensor in tensors_of(module)
        if (module, holder, name) not in in_units
    ]
    aside = _aside(found)
    if make_rest is None:
        places, rest = _move_rest(part, found, lambda size: _rest_on_host(memory, rank, size))
    else:
        places, rest = _move_rest(part, found, make_rest)
    manifest = PartManifest(
        describe_units(units, layouts, own),
        tuple(places),
        rest.numel(),
        numbers_of([checksum(rest)])[0],
        (*_plain_values(part), *aside),
        compute(part),
    )
    manifest.store(memory, rank)
    return StoredPart(manifest, own)


def _rest_on_host(memory: CellMemory, rank: int, num_bytes: int) -> RestMemory:
    return RestMemory(rest_memory(memory, rank, num_bytes))


def _move_rest(
    part: nn.Module, found: list[_Found], make_rest: MakeRest
) -> tuple[list[TensorPlace], torch.Tensor]:
    """Move the tensors outside of the units; return their places, and their memory.

    Tensors of one storage keep their distances in it.
    """
    storages: dict[int, list[_Found]] = defaultdict(list)
    places = []
    while found:
        each = found.pop()
        if each[3].numel():
            storages[each[3].untyped_storage().data_ptr()].append(each)
        else:
            places.append(_place_of(each, 0))
    spans = {address: _span_of([each[3] for each in of]) for address, of in storages.items()}
    sizes = {address: _aligned(len(span), ALIGNMENT_BYTES) for address, span in spans.items()}
    rest = make_rest(sum(sizes.values()))
    raw, base = rest.raw, 0
    for address, span in spans.items():
        tensors = storages.pop(address)
        if rest.grow is not None:
            rest.grow(base + len(span))
        storage = torch.empty(0, dtype=torch.int8, device=raw.device)
        storage.set_(tensors[0][3].untyped_storage())
        raw[base : base + len(span)].copy_(storage[span.start : span.stop])
        for each in tensors:
            place = _place_of(each, base - span.start)
            module, there = part.get_submodule(place.layer), place.view(raw)
            held = (getattr(module, place.holder) if place.holder else vars(module))[place.name]
            # In place: all holders of the tensor then use it in memory, and tied layers stay tied.
            held.data = there
            places.append(place)
        base += sizes[address]
        del storage, tensors, held, each  # The old memory ends before there is more of the new.
    if rest.keep is not None:
        rest.keep()
    return places, raw


def _aside(found: list[_Found]) -> list[PlainValue]:
    """Take out the small tensors in memory of the host, where the largest is on a device.

    Raises:
        ViewError: if a tensor is on yet another device, or large.
    """
    device = max(found, key=lambda each: each[3].nbytes)[3].device
    others = [each for each in found if each[3].device != device]
    for path, _, name, tensor in others:
        if tensor.device.type != "cpu" or tensor.nbytes > ASIDE_BYTES_MAX:
            raise ViewError(
                f"the tensor {name} of layer {path} lies on {tensor.device}, not on {device}."
            )
    found[:] = [each for each in found if each[3].device == device]
    return [PlainValue(*each[:3], each[3].clone()) for each in others]


def _place_of(found: _Found, move: int) -> TensorPlace:
    """Return the place of a tensor, `move` bytes further than in its storage."""
    path, holder, name, tensor = found
    offset = tensor.storage_offset() * tensor.itemsize + move
    return TensorPlace(
        path, holder, name, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset
    )


def _span_of(tensors: Sequence[torch.Tensor]) -> range:
    """Return the bytes of a storage that its tensors may use, from an aligned one on."""
    starts = [each.storage_offset() * each.itemsize for each in tensors]
    ends = [
        start + extent_of(each.shape, each.stride()) * each.itemsize
        for start, each in zip(starts, tensors, strict=True)
    ]
    return range(min(starts) // ALIGNMENT_BYTES * ALIGNMENT_BYTES, max(ends))


def _plain_values(part: nn.Module) -> Iterator[PlainValue]:
    """Yield the numbers of all modules, and what is None."""
    for path, module in part.named_modules():
        for holder in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, holder).items():
                if tensor is None:
                    yield PlainValue(path, holder, name, None)
        for name, value in vars(module).items():
            if value is None or isinstance(value, float):
                yield PlainValue(path, "", name, value)

"""vLLM adapter: connects the parts of all ranks: who lends what to whom, and into which slots.

Each rank moves its units into memory that its peers map once, at start-up. From then on nobody asks
anybody: weights do not change, and a lender does not notice that it lends.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from comm_pool.cpu.cell_memory import CellMemory, weights_name
from comm_pool.loans import Loan, loan_plan, part_of
from kvadaptor.transfer.peers import allocate, export_handle, open_peer
from worker.engine.weights.borrowed import BorrowedUnit, UnitPart
from worker.engine.weights.layers import ViewError
from worker.engine.weights.part_memory import (
    Unit,
    UnitKind,
    UnitLayout,
    layout_of,
    move_in,
    units_of,
)
from worker.engine.weights.ring import LoanCopy, LoanRing, make_ring

PAGE_BYTES = 4096

Memory = Sequence[torch.Tensor]
"""The memory of each unit of one rank's part, (bytes,) int8."""


@dataclass(frozen=True, slots=True)
class Borrowing:
    """What a rank computes alone with: its units with all their parts, and its ring."""

    units: Mapping[str, BorrowedUnit]
    ring: LoanRing
    lent: tuple[torch.Tensor, ...]
    """The slots of the ring, and copies of peers' small tensors."""
    own_bytes: int
    """Bytes of the rank's part in memory that its peers read."""

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring and of the copies."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.lent)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among the `ranks` that share out `parts` parts; `first` is their first."""

    rank: int
    first: int
    ranks: int
    parts: int

    @property
    def part(self) -> int:
        """The part that the rank holds."""
        return part_of(self.rank - self.first, self.ranks, self.parts)


def share_parts(
    part: nn.Module,
    place: Place,
    device: torch.device,
    *,
    memory: CellMemory | None,
    cpu_group: Any,
    meet: Callable[[], None],
) -> Borrowing:
    """Move the units of a loaded part into memory that peers map, map theirs, and plan the loans.

    A collective of all ranks that start together. On CPU the memory is the cell's; elsewhere ranks
    exchange handles through `cpu_group`, whose members ascend from `place.first`. `meet` returns
    when all ranks have filled their memory.

    Raises:
        ViewError: if the parts of two ranks are laid out differently.
    """
    units = list(units_of(part))
    if not units:
        raise ViewError("the model has no layers to borrow: use --borrow none.")
    layouts = [layout_of(unit) for unit in units]
    if memory is not None:
        own = _cell_part(memory, place.rank, layouts, is_own=True)
    else:
        own = [allocate(layout.num_bytes, device) for layout in layouts]
    for unit, layout, raw in zip(units, layouts, own, strict=True):
        move_in(unit, layout, raw)
    meet()
    peers = {
        rank: _cell_part(memory, rank, layouts, is_own=False) if memory is not None else []
        for rank in range(place.first, place.first + place.ranks)
        if rank != place.rank
    }
    if memory is None:
        peers = _open_parts(own, place, device, cpu_group)
    return _borrowing(units, layouts, own, peers, place, device)


def _cell_part(
    memory: CellMemory, rank: int, layouts: Sequence[UnitLayout], *, is_own: bool
) -> Memory:
    """Return the memory of each unit of a rank's part, in the cell's memory."""
    sizes = [-(-layout.num_bytes // PAGE_BYTES) * PAGE_BYTES for layout in layouts]
    mapped = memory.map(weights_name(rank), sum(sizes), is_own=is_own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is read-only, which is the point
        raw = torch.frombuffer(mapped, dtype=torch.int8)
    return [
        piece[: layout.num_bytes] for piece, layout in zip(raw.split(sizes), layouts, strict=True)
    ]


def _open_parts(
    own: Memory, place: Place, device: torch.device, cpu_group: Any
) -> dict[int, Memory]:
    """Exchange handles of all units and map those of the peers; a collective."""
    handles = [export_handle(raw) for raw in own]
    everyone: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(everyone, (place.rank, handles), group=cpu_group)
    return {
        rank: [open_peer(handle, device) for handle in theirs]
        for rank, theirs in everyone
        if rank != place.rank and place.first <= rank < place.first + place.ranks
    }


def _borrowing(
    units: Sequence[Unit],
    layouts: Sequence[UnitLayout],
    own: Memory,
    peers: Mapping[int, Memory],
    place: Place,
    device: torch.device,
) -> Borrowing:
    loans = plan_of_units([unit.kind for unit in units], place)
    slots: dict[tuple[UnitKind, int], torch.Tensor] = {}
    for loan in loans:
        key = units[loan.layer].kind, loan.slot
        size = layouts[loan.layer].loan_bytes
        if key not in slots or slots[key].numel() < size:
            slots[key] = torch.empty(size, dtype=torch.int8, device=device)
    copies, residents = [], []
    parts: list[list[UnitPart]] = []
    for layout, raw in zip(layouts, own, strict=True):
        views = [(each, each.view(raw)) for each in layout.places]
        parts.append([UnitPart(place.part, None, views)])
    for number, loan in enumerate(loans):
        unit, layout = units[loan.layer], layouts[loan.layer]
        source = peers[place.first + loan.lender][loan.layer]
        slot = slots[unit.kind, loan.slot][: layout.loan_bytes]
        copies.append(LoanCopy(source[: layout.loan_bytes], slot, loan.after))
        # Small tensors keep their offsets, so both kinds of places read one layout.
        resident = source[layout.loan_bytes :].clone()
        residents.append(resident)
        views = [
            (
                each,
                each.view(slot)
                if each.offset < layout.loan_bytes
                else each.moved(-layout.loan_bytes).view(resident),
            )
            for each in layout.places
        ]
        parts[loan.layer].append(UnitPart(loan.part, number, views))
    borrowed = {
        unit.name: BorrowedUnit(unit, tuple(of_unit))
        for unit, of_unit in zip(units, parts, strict=True)
    }
    lent = (*slots.values(), *(each for each in residents if each.numel()))
    own_bytes = sum(layout.num_bytes for layout in layouts)
    return Borrowing(borrowed, make_ring(copies, device), lent, own_bytes)


def plan_of_units(kinds: Sequence[UnitKind], place: Place) -> tuple[Loan, ...]:
    """Return the loans of a step, in the order of use; `layer` is the number of a unit.

    Units of one kind share slots, as they are of one size.
    """
    counts = Counter(kinds)
    found: list[tuple[int, int, UnitKind, Loan]] = []
    for kind, count in counts.items():
        numbers = [number for number, each in enumerate(kinds) if each is kind]
        plan = loan_plan(place.rank - place.first, place.ranks, place.parts, count)
        found += [(numbers[loan.layer], index, kind, loan) for index, loan in enumerate(plan)]
    found.sort(key=lambda each: each[:2])
    number_of = {(kind, index): n for n, (_, index, kind, _) in enumerate(found)}
    return tuple(
        Loan(
            unit,
            loan.part,
            loan.lender,
            loan.slot,
            None if loan.after is None else number_of[kind, loan.after],
        )
        for unit, _, kind, loan in found
    )

"""vLLM adapter: connects the parts of all ranks: who lends what to whom, and into which slots.

Each rank moves its units into memory that its peers map once, at start-up. From then on nobody asks
anybody: weights do not change, and a lender does not notice that it lends.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.utils import extract_layer_index

from comm_pool.cpu.cell_memory import CellMemory
from comm_pool.loans import Loan, loan_plan, part_of, spread_whole
from kvadaptor.transfer.peers import (
    allocate,
    attempt,
    export_handle,
    gather_all,
    open_peer,
    refusal_of,
)
from worker.engine.weights.borrowed import BorrowedUnit, UnitPart
from worker.engine.weights.layers import ViewError
from worker.engine.weights.loan_proof import Promise, prove_copies, prove_loans
from worker.engine.weights.manifest import LentUnit, PartManifest
from worker.engine.weights.part_memory import (
    Unit,
    UnitKind,
    UnitLayout,
    layouts_of,
    move_in,
    units_of,
)
from worker.engine.weights.part_store import (
    Memory,
    StoredPart,
    describe_units,
    store_part,
    unit_memory,
)
from worker.engine.weights.ring import LoanCopy, LoanRing, make_ring
from worker.engine.weights.whole_layers import AutoWhole


@dataclass(frozen=True, slots=True)
class Borrowing:
    """What a rank computes alone with: its units with all their parts, and its ring."""

    units: Mapping[str, BorrowedUnit]
    ring: LoanRing
    lent: tuple[torch.Tensor, ...]
    """The slots of the ring, copies of peers' tensors, and memory of peers that is read there."""
    lenders: tuple[int, ...] = ()
    """The processes that the peers' memory ends with."""
    whole_layers: int = 0
    """Layers of which the rank holds all parts, and borrows none."""
    lm_head_ring: LoanRing = field(default_factory=lambda: LoanRing(()))
    """The loans that bring the lm_head, after a forward pass, through the slots of `ring`."""
    lent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Own bytes by what they are for: the ring and its small tensors, and whole layers."""


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

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that share out the parts."""
        ranks = range(self.first, self.first + self.ranks)
        return tuple(rank for rank in ranks if rank != self.rank)


def share_parts(
    part: nn.Module,
    place: Place,
    device: torch.device,
    *,
    memory: CellMemory | None,
    cpu_group: Any,
    meet: Callable[[], None],
    stored: StoredPart | None = None,
    whole_layers: AutoWhole | int = 0,
) -> Borrowing:
    """Move the units of a loaded part into memory that peers map, map theirs, and plan the loans.

    A collective of all ranks that start together. On CPU the memory is the cell's; elsewhere ranks
    exchange handles through `cpu_group`, whose members ascend from `place.first`. `meet` returns
    when all ranks have filled their memory. `stored` is the part if it was found in the
    cell's memory; any other part is stored there. Every loan is compared with what its lender
    holds.

    Of `whole_layers` layers, evenly spread, the rank copies all parts now and borrows none;
    `AutoWhole` decides once the rate of the loans is known.

    Raises:
        ViewError: if the parts of two ranks are laid out differently, or a loan brings other bytes.
    """
    units = list(units_of(part))
    if not units:
        raise ViewError("the model has no layers to borrow: use --borrow none.")
    if memory is not None:
        if stored is None:
            stored = store_part(part, units, memory, place.rank)
        described, layouts, own = stored.manifest.units, stored.manifest.layouts, stored.units
        meet()
        peers = _stored_parts(memory, place)
    else:
        layouts = layouts_of(units)
        own = []
        for unit, layout in zip(units, layouts, strict=True):
            # One after the other: at most one unit is in memory twice.
            own.append(allocate(layout.num_bytes, device))
            move_in(unit, layout, own[-1])
        described = describe_units(units, layouts, own)
        meet()
        peers = _open_parts(own, described, place, device, cpu_group)
    for rank, peer in peers.items():
        _check_same(rank, peer.units, described)
    build = partial(_borrowing, units, layouts, own, peers, place, device)
    if isinstance(whole_layers, int):
        borrowing, prove = build(whole_layers)
    else:
        borrowing, prove = build(0)
        meet()  # All ranks measure at once, as they borrow in service.
        rate = borrowing.ring.step_bytes / borrowing.ring.floor_s()
        part_bytes = [sum(layouts[n].loan_bytes for n in layer) for layer in layers_of(units)]
        lm_head_s = borrowing.lm_head_ring.step_bytes / rate
        if count := whole_layers.decide(part_bytes, place.parts, rate, lm_head_s):
            borrowing, prove = build(count)
    prove()
    return borrowing


def layers_of(units: Sequence[Unit]) -> list[list[int]]:
    """Return the numbers of the units of each layer, in order."""
    layers: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        if not unit.kind.is_of_layer:
            continue
        layers.setdefault(extract_layer_index(unit.name), []).append(number)
    return [layers[index] for index in sorted(layers)]


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer's part: its units, and the memory of each."""

    units: Sequence[LentUnit]
    memory: Memory
    pid: int | None = None
    """The process that the memory ends with; None if it outlives it."""


def _stored_parts(memory: CellMemory, place: Place) -> dict[int, _Peer]:
    """Map the parts of the peers in the cell's memory."""
    peers = {}
    for rank in place.peers:
        stored = PartManifest.load(memory, rank)
        if stored is None:
            raise ViewError(
                f"rank {rank} has not stored its part of the weights: start this rank again when "
                "that one is ready."
            )
        peers[rank] = _Peer(stored.units, unit_memory(memory, rank, stored.layouts, is_own=False))
    return peers


def _open_parts(
    own: Memory,
    described: Sequence[LentUnit],
    place: Place,
    device: torch.device,
    cpu_group: Any,
) -> dict[int, _Peer]:
    """Exchange handles of all units and map those of the peers; a collective."""
    offers = gather_all(
        attempt(lambda: (place.rank, described, os.getpid(), [export_handle(raw) for raw in own])),
        cpu_group,
    )
    _check_offers(offers)
    peers: dict[int, _Peer] = {}
    reason = attempt(
        lambda: peers.update(
            (rank, _Peer(units, [open_peer(handle, device) for handle in theirs], pid))
            for rank, units, pid, theirs in offers.values()
            if rank in place.peers
        )
    )
    # Also keeps a rank from ending before the others have opened its memory.
    _check_offers(gather_all(reason, cpu_group))
    return peers


def _check_offers(offers: Mapping[int, Any]) -> None:
    """Refuse, alike on all ranks, weights that one of them cannot share or read."""
    if (reason := refusal_of(offers)) is not None:
        raise ViewError(
            f"ranks cannot read each other's weights ({reason}): use devices with peer access, or "
            "--borrow none."
        )


def _check_same(rank: int, theirs: Sequence[LentUnit], own: Sequence[LentUnit]) -> None:
    """Refuse a peer whose units do not lie in memory as the rank's own do."""
    for other, ours in zip_longest(theirs, own):
        if other is None or ours is None or other.key != ours.key:
            name = (ours or other).name
            raise ViewError(
                f"the unit {name} of rank {rank} has another layout than this rank's: use "
                "--borrow none, and please report it with the model's config.json."
            )


def _borrowing(
    units: Sequence[Unit],
    layouts: Sequence[UnitLayout],
    own: Memory,
    peers: Mapping[int, _Peer],
    place: Place,
    device: torch.device,
    whole_layers: int,
) -> tuple[Borrowing, Callable[[], None]]:
    """Return what the rank computes alone with, and the proof of its loans, not yet run."""
    layers = layers_of(units)
    whole = {n for layer in spread_whole(len(layers), whole_layers) for n in layers[layer]}
    parts: list[list[UnitPart]] = []
    for layout, raw in zip(layouts, own, strict=True):
        views = [(each, each.view(raw)) for each in layout.places]
        parts.append([UnitPart(place.part, None, views)])
    held = _parts_of_peers(whole, layouts, peers, place, copied=True)
    kinds = [unit.kind for unit in units]
    in_place = [n for n, kind in enumerate(kinds) if kind is UnitKind.EMBEDDINGS]
    read = _parts_of_peers(in_place, layouts, peers, place, copied=False)
    for number, unit_part, _ in (*held, *read):
        parts[number].append(unit_part)
    in_forward = [_Lent(n, layout.pieces[0]) for n, layout in enumerate(layouts)]
    plans = [
        _Plan(in_forward, plan_of_units(kinds, place, whole)),
        _plan_of_lm_head(kinds, layouts, place),
    ]
    slots, slot_kinds = _make_slots(plans, units, layouts, device)
    made = [_make_loans(plan, layouts, peers, place, slots, slot_kinds) for plan in plans]
    rings = [make_ring(each.copies, device) for each in made]
    of_lm_head = [kind is UnitKind.LM_HEAD for kind in kinds]
    borrowed = {
        unit.name: BorrowedUnit(unit, (*of_unit, *made[which].parts[n]), rings[which])
        for n, (unit, of_unit, which) in enumerate(zip(units, parts, of_lm_head, strict=True))
    }
    residents = [resident for each in made for resident in each.residents]
    of_ring = [*slots.values(), *(each for each in residents if each.numel())]
    of_whole = [copy for *_, copy in held]
    lent_bytes = {
        "ring": sum(each.nbytes for each in of_ring),
        "whole_layers": sum(each.nbytes for each in of_whole),
    }
    lenders = tuple(peer.pid for peer in peers.values() if peer.pid is not None)

    def prove() -> None:
        for ring, each in zip(rings, made, strict=True):
            prove_loans(ring, each.residents, each.promises)

    lent = (*of_ring, *of_whole, *(memory for *_, memory in read))
    borrowing = Borrowing(borrowed, rings[0], lent, lenders, whole_layers, rings[1], lent_bytes)
    return borrowing, prove


@dataclass(frozen=True, slots=True)
class _Lent:
    """What one loan brings of a unit, by its number."""

    unit: int
    piece: range


@dataclass(frozen=True, slots=True)
class _Plan:
    """The loans of one ring; their `layer` is a number in `lent`."""

    lent: Sequence[_Lent]
    loans: Sequence[Loan]


@dataclass(slots=True)
class _Loans:
    """The loans of one ring, by number."""

    copies: list[LoanCopy] = field(default_factory=list)
    residents: list[torch.Tensor] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    parts: dict[int, list[UnitPart]] = field(default_factory=lambda: defaultdict(list))
    """What they bring, by number of the unit."""


_Slots = Mapping[tuple[UnitKind, int], torch.Tensor]
"""The memory of each slot, by whose loans take it and by its number."""


def _make_slots(
    plans: Sequence[_Plan],
    units: Sequence[Unit],
    layouts: Sequence[UnitLayout],
    device: torch.device,
) -> tuple[_Slots, list[UnitKind]]:
    """Return the slots of all plans, and whose slots each unit takes.

    Units of a kind take turns in slots. The lm_head is used when no other unit is, so its pieces
    take the slots of the largest ones, which they fit.
    """
    of_layers = [n for n, unit in enumerate(units) if unit.kind.is_of_layer]
    largest = units[max(of_layers, key=lambda n: layouts[n].loan_bytes)].kind
    kinds = [unit.kind if unit.kind.is_of_layer else largest for unit in units]
    sizes: dict[tuple[UnitKind, int], int] = defaultdict(int)
    for plan in plans:
        for loan in plan.loans:
            lent = plan.lent[loan.layer]
            key = kinds[lent.unit], loan.slot
            sizes[key] = max(sizes[key], len(lent.piece))
    made = {key: torch.empty(size, dtype=torch.int8, device=device) for key, size in sizes.items()}
    return made, kinds


def _make_loans(
    plan: _Plan,
    layouts: Sequence[UnitLayout],
    peers: Mapping[int, _Peer],
    place: Place,
    slots: _Slots,
    kinds: Sequence[UnitKind],
) -> _Loans:
    """Return the loans of a plan; `kinds` says whose slots each unit takes."""
    made = _Loans()
    for number, loan in enumerate(plan.loans):
        unit, piece = plan.lent[loan.layer].unit, plan.lent[loan.layer].piece
        layout, lender = layouts[unit], place.first + loan.lender
        source, known = peers[lender].memory[unit], peers[lender].units[unit]
        slot = slots[kinds[unit], loan.slot][: len(piece)]
        made.copies.append(LoanCopy(source[piece.start : piece.stop], slot, loan.after))
        # Small tensors keep their offsets, so both kinds of places read one layout.
        resident = source[layout.loan_bytes :].clone()
        made.residents.append(resident)
        sums = known.sums.of_piece(layout.pieces.index(piece))
        made.promises.append(Promise(known.name, lender, sums))
        views = [(each, each.view(slot)) for each in layout.places_in(piece)]
        views += [
            (each, each.moved(-layout.loan_bytes).view(resident))
            for each in layout.places
            if each.offset >= layout.loan_bytes
        ]
        row = layout.first_row(piece)
        made.parts[unit].append(UnitPart(loan.part, number, views, row))
    return made


def _plan_of_lm_head(
    kinds: Sequence[UnitKind], layouts: Sequence[UnitLayout], place: Place
) -> _Plan:
    """Return the loans of the lm_head, piece by piece; none if it is whole."""
    pieces = [
        _Lent(n, piece)
        for n, kind in enumerate(kinds)
        if kind is UnitKind.LM_HEAD
        for piece in layouts[n].pieces
    ]
    plan = loan_plan(place.rank - place.first, place.ranks, place.parts, len(pieces))
    return _Plan(pieces, plan)


def _parts_of_peers(
    numbers: Collection[int],
    layouts: Sequence[UnitLayout],
    peers: Mapping[int, _Peer],
    place: Place,
    *,
    copied: bool,
) -> list[tuple[int, UnitPart, torch.Tensor]]:
    """Return (unit, part, its memory) of all parts of these units that the rank lacks, compared.

    The memory is a copy that the rank keeps, or the lender's.
    """
    made, memory, promises = [], [], []
    for number in numbers:
        layout = layouts[number]
        for loan in loan_plan(place.rank - place.first, place.ranks, place.parts, 1):
            lender = place.first + loan.lender
            lent, raw = peers[lender].units[number], peers[lender].memory[number]
            raw = raw.clone() if copied else raw
            memory.append((raw[: layout.loan_bytes], raw[layout.loan_bytes :]))
            promises.append(Promise(lent.name, lender, lent.sums))
            views = [(each, each.view(raw)) for each in layout.places]
            made.append((number, UnitPart(loan.part, None, views), raw))
    prove_copies(memory, promises)
    return made


def plan_of_units(
    kinds: Sequence[UnitKind], place: Place, whole: Collection[int] = ()
) -> tuple[Loan, ...]:
    """Return the loans of a step, in the order of use; `layer` is the number of a unit.

    Units of one kind share slots, as they are of one size. Those in `whole` are not borrowed;
    embeddings are read where they lie, and no forward pass computes the lm_head.
    """
    counts = Counter(kind for kind in kinds if kind.is_of_layer)
    found: list[tuple[int, int, UnitKind, Loan]] = []
    for kind, count in counts.items():
        numbers = [number for number, each in enumerate(kinds) if each is kind]
        held = [index for index, number in enumerate(numbers) if number in whole]
        plan = loan_plan(place.rank - place.first, place.ranks, place.parts, count, whole=held)
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

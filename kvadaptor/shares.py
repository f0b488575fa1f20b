"""Which share of a block each member of a group computes, and what a share takes of others. Pure.

A block of any group has all layers and heads of b tokens. Its members divide it by the group's
split into `Slots.count` shares, numbered as slots are: a range of layers times a range of heads.
Host pages keep the shares of a block together; in the memory of ranks each lies with its member.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import PageGeometry, Slots, Split

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """The share of each block that a member of a group computes: its `number`, 0..count-1.

    Where there are fewer heads than parts, neighbours have the same share; one of them is `first`.
    """

    slots: Slots
    number: int
    is_first: bool


@cache
def share_of(geometry: PageGeometry, split: Split, place: int) -> Share:
    """Return the share of the member at this place of a group with this split."""
    slots = geometry.slots(split)
    stage, part = divmod(split.share_of(place), split.tp)
    column, rest = divmod(part * slots.columns, split.tp)
    return Share(slots, stage * slots.columns + column, rest == 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a share that one share of another split has too: some layers, some heads.

    `share` is that of the other split. Both keep the piece from layer `source_layer`, and
    `target_layer`, of theirs on, in column `source_column` and `target_column` of the `columns`
    into which a slot is divided there.
    """

    share: int
    source_layer: int
    source_column: int
    target_layer: int
    target_column: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces that make up a share, all of `layers` layers and one of `columns` of a page."""

    layers: int
    columns: int
    pieces: tuple[Piece, ...]


def pieces_of(source: Slots, target: Slots, share: int) -> Pieces:
    """Return which pieces of the shares of `source` make up a share of `target`."""
    layers = min(source.layers, target.layers)
    columns = max(source.columns, target.columns)

    def found() -> Iterator[Piece]:
        per_source, per_target = columns // source.columns, columns // target.columns
        row, column = divmod(share, target.columns)
        for layer in range(0, target.layers, layers):
            stage, source_layer = divmod(row * target.layers + layer, source.layers)
            for part in range(per_target):
                held, source_column = divmod(column * per_target + part, per_source)
                number = stage * source.columns + held
                yield Piece(number, source_layer, source_column, layer, part)

    return Pieces(layers, columns, tuple(found()))


def holder_of(slots: Slots, tp: int, share: int) -> int:
    """Return who has a share, by the order of `lease_key`: of those with the same, the first."""
    stage, column = divmod(share, slots.columns)
    return stage * tp + -(-column * tp // slots.columns)


def numbers_of(slots: Slots, num_pages: int, places: Numbers) -> Numbers:
    """Return the block number of each of these slots, (n,), in a memory of `num_pages` pages.

    See `Slots.first_blocks`.
    """
    page, slot = np.divmod(places, slots.count)
    first = np.array(slots.first_blocks(num_pages), dtype=np.int64)
    numbers: Numbers = page * slots.columns + first[slot]
    return numbers


def units_of(
    slots: Slots, num_pages: int, columns: int, numbers: Numbers, layers: range, column: int
) -> Numbers:
    """Return where pieces of these blocks lie, (n, layers), counted in units of the memory.

    A unit is 1/`columns` of a page in one layer; a slot has several side by side, and `column` is
    one of them. `layers` are those of the slot.
    """
    per_slot = columns // slots.columns
    first = np.asarray(numbers)[:, np.newaxis] * per_slot + column
    units: Numbers = first + np.arange(layers.start, layers.stop) * (num_pages * columns)
    return units

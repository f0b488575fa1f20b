"""Which units make up a slot of a group, and which fragments of a block each member computes. Pure.

Units and fragments are numbered row by row of the component's grid, so those of one slot mostly
follow each other. They do not where a group divides heads, but layers less than another group of
the component does: then a slot is part of several rows. Terms: `reshard.terms`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import Split
from kvadaptor.reshard.terms import Ints

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class UnitOrder:
    """The order of units in the slots of one group, `per_slot` (w) in each.

    `split` is the group's, its width is k. `table` is (k, w): the units of each slot of page 0,
    and `places` (U,) the place of each unit in it; both are None if units follow each other.
    """

    split: Split
    per_slot: int
    table: Ints | None = None
    places: Ints | None = None

    def fragments(self, place: int) -> slice | Ints:
        """Return the w fragments of each block that a member computes, in the order of a slot."""
        return self.fragments_of(self.split.share_of(place))

    def fragments_of(self, share: int) -> slice | Ints:
        """Return the w fragments of a share of each block, in the order of a slot."""
        if self.table is None:
            return slice(share * self.per_slot, (share + 1) * self.per_slot)
        fragments: Ints = self.table[share]
        return fragments

    @property
    def holders(self) -> Ints:
        """(U,): the place of the member that computes each fragment."""
        holders = np.empty(self.split.width * self.per_slot, dtype=np.int64)
        for place in range(self.split.width):
            holders[self.fragments(place)] = place
        return holders

    def units_of(self, slots: Ints) -> Ints:
        """Return (w, n): the units of these slots, (n,)."""
        if self.table is None:
            return slots * self.per_slot + np.arange(self.per_slot)[:, np.newaxis]
        page, slot = np.divmod(slots, self.split.width)
        units: Ints = page * self.table.size + self.table[slot].T
        return units

    def slot_of(self, units: Ints) -> Ints:
        """Return the slot that each unit is part of; any shape."""
        # By bits: a quotient or remainder takes several times as long, and w is a power of two.
        bits = self.per_slot.bit_length() - 1
        if self.places is None:
            return units >> bits
        page, unit = np.divmod(units, self.places.size)
        slots: Ints = page * self.split.width + (self.places[unit] >> bits)
        return slots

    def offset_of(self, units: Ints) -> Ints:
        """Return each unit's place in its slot, 0..w-1; any shape."""
        if self.places is None:
            return units & (self.per_slot - 1)
        offsets: Ints = self.places[units & (self.places.size - 1)] & (self.per_slot - 1)
        return offsets

    def by_slot(self, marks: Bools) -> Bools:
        """Return (k·p, w): the marks of the units of p pages, (p, U), by slot."""
        if self.table is not None:
            marks = marks[:, self.table.reshape(-1)]
        return marks.reshape(-1, self.per_slot)

    def mark(self, marks: Bools, slots: Ints) -> None:
        """Set the marks of all units of these slots; `marks` is contiguous, (units of a rank,)."""
        if self.table is None:
            marks.reshape(-1, self.per_slot)[slots] = True
        else:
            marks[self.units_of(slots)] = True


def order_of(split: Split, finest: Split) -> UnitOrder:
    """Return the order of a group of this split in a component whose units are those of `finest`.

    Both ranges of the split divide those of `finest`.
    """
    per_slot = finest.width // split.width
    if split.pp == finest.pp or split.tp == 1:
        return UnitOrder(split, per_slot)
    rows, columns = finest.pp // split.pp, finest.tp // split.tp
    grid = np.arange(finest.width).reshape(split.pp, rows, split.tp, columns)
    table = grid.transpose(0, 2, 1, 3).reshape(split.width, per_slot)
    return UnitOrder(split, per_slot, table, np.argsort(table.reshape(-1)))

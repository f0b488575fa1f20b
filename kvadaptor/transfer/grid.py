"""Where the units of a split lie in a rank's KV memory, and which of a round are a rank's."""

from dataclasses import dataclass

import numpy as np
import torch

from kvadaptor.geometry import GeometryError, PageGeometry, Slots, Split
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import CopiesBySource, MoveError, Round, Units
from kvadaptor.transfer.unit_copy import Copies, Regions

NOTHING: CopiesBySource = {}


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the units of a split lie in the memory of a rank."""

    geometry: PageGeometry
    slots: Slots

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit in one of its layers."""
        return self.geometry.layer_page_bytes // self.slots.columns

    @property
    def whole_bytes(self) -> int:
        """Bytes of a unit in all its layers."""
        return self.slots.layers * self.unit_bytes

    def count(self, raw: torch.Tensor) -> int:
        """Return the number of units in a rank's memory."""
        return int(raw.numel()) // self.whole_bytes

    def check(self, raw: torch.Tensor, units: Units) -> None:
        """Raise `MoveError` for units that do not exist."""
        count = self.count(raw)
        if units.size and (units.min() < 0 or units.max() >= count):
            raise MoveError(f"a unit is not in 0..{count - 1}.")

    def between(
        self, source: torch.Tensor, pair: tuple[Units, Units], target: torch.Tensor
    ) -> Copies:
        """Return the copies from one rank's memory to another's; raises `MoveError`."""
        if pair[0].size != pair[1].size:
            raise MoveError("source and destination units differ in number.")
        self.check(source, pair[0])
        self.check(target, pair[1])
        units = self.blocks(source, pair[0]), self.blocks(target, pair[1])
        regions = Regions(self.slots.layers, self._region(source), self._region(target))
        return Copies(source, units[0], target, units[1], regions)

    def packing(self, raw: torch.Tensor, units: Units, place: torch.Tensor) -> Copies:
        """Return the copies of units from a rank's memory into staging, one after the other."""
        regions = Regions(self.slots.layers, self._region(raw), units.size * self.unit_bytes)
        return Copies(raw, self.blocks(raw, units), place, np.arange(units.size), regions)

    def unpacking(self, place: torch.Tensor, units: Units, raw: torch.Tensor) -> Copies:
        """Return the copies back, into the units of a rank's memory."""
        regions = Regions(self.slots.layers, units.size * self.unit_bytes, self._region(raw))
        return Copies(place, np.arange(units.size), raw, self.blocks(raw, units), regions)

    def _region(self, raw: torch.Tensor) -> int:
        return int(raw.numel()) // self.geometry.num_layers

    def blocks(self, raw: torch.Tensor, units: Units) -> Units:
        """Return where units lie in their first layers; see `Slots.first_blocks`."""
        slots = self.slots
        if slots.rows == 1:
            return units
        num_pages = self.count(raw) // slots.count
        first = np.array(slots.first_blocks(num_pages), dtype=np.int64)
        page, unit = np.divmod(units, slots.count)
        blocks: Units = page * slots.columns + first[unit]
        return blocks


def grid_of(geometry: PageGeometry, finest: Split) -> Grid:
    """Return the grid of units; raises `MoveError` if a page has none such."""
    try:
        slots = geometry.slots(finest)
    except GeometryError as error:
        raise MoveError(str(error)) from None
    if slots.count != finest.width:
        raise MoveError(f"a page of {slots.count} slots has no {finest.width} equal units.")
    return Grid(geometry, slots)


def own_part(
    copies: Round, grid: Grid, raw: torch.Tensor, rank: int, world: int
) -> tuple[dict[int, Units], dict[int, Units]]:
    """Return a rank's units by the rank that gets them, and by the rank that they come from.

    Raises `MoveError` for units or ranks that do not exist.
    """
    sends, receives = {}, {}
    for target, sources in copies.items():
        for source, (source_units, target_units) in sources.items():
            if source_units.size != target_units.size:
                raise MoveError("source and destination units differ in number.")
            if not (0 <= source < world and 0 <= target < world):
                raise MoveError(f"rank {max(source, target)} is not in this group.")
            if source == rank:
                grid.check(raw, source_units)
                sends[target] = source_units
            if target == rank:
                grid.check(raw, target_units)
                receives[source] = target_units
    sends.pop(rank, None)
    receives.pop(rank, None)
    return sends, receives


def stats_of(copies: CopiesBySource, rank: int, whole_unit: int, seconds: float) -> MoveStats:
    """Return the statistics of a rank's part of a round; `whole_unit` is the bytes of a unit."""
    sizes = {source: int(pair[0].size) * whole_unit for source, pair in copies.items()}
    local = sizes.get(rank, 0)
    return MoveStats(sum(sizes.values()) - local, local, seconds)

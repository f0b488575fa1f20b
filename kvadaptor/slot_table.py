"""A rank's table of one group: logical blocks of the group -> physical slots of this rank. Pure.

A group's scheduler numbers logical blocks; every rank keeps its own table to physical slots, so
ranks never need equal block ids.
"""

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import Slots
from kvadaptor.pages import distinct

UNMAPPED = -1
"""Table entry of a logical block without a page so far."""


class SlotTable:
    """Logical block -> physical slot of one group on one rank; int32, one entry per block.

    A slot is `slots_per_page`·page + its place in the page. The engine numbers slots as its memory
    has them (`Slots.first_blocks`), which is the same without pipeline stages.

    A group mostly gets the same pages under the same indices again, so `unmap` leaves an index's
    entries in place, and the next lease writes only what differs.
    """

    def __init__(self, num_pages: int, slots_per_page: int, slots: Slots | None = None) -> None:
        """`slots` of a pipeline group; without it, the engine's numbers are those of slots."""
        self.slots_per_page = slots_per_page
        self._of_engine: npt.NDArray[np.int32] | None = None
        if slots is not None and slots.rows > 1:
            first = np.arange(num_pages)[:, np.newaxis] * slots.columns
            numbers = first + np.array(slots.first_blocks(num_pages))
            self._of_engine = numbers.reshape(-1).astype(np.int32)
        self._slots: npt.NDArray[np.int32] = np.full(
            num_pages * slots_per_page, UNMAPPED, dtype=np.int32
        )
        self._by_index = self._slots.reshape(num_pages, slots_per_page)
        self._by_index[0] = np.arange(slots_per_page)
        # The page whose slots an index covers in order; UNMAPPED if it is not a single page's.
        self._page: npt.NDArray[np.int64] = np.full(num_pages, UNMAPPED, dtype=np.int64)
        self._leased: npt.NDArray[np.bool_] = np.zeros(num_pages, dtype=np.bool_)
        self._leased[0] = True

    def map(self, indices: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Map lease indices to pages."""
        if not indices.size:
            return
        first, last = int(indices[0]), int(indices[-1])
        if indices.size == last + 1 - first and (indices[1:] > indices[:-1]).all():
            span = slice(first, last + 1)
            self._leased[span] = True
            self._write(span, pages)
            return
        self._leased[indices] = True
        changed = self._page[indices] != pages
        self._write(indices[changed], pages[changed])

    def _write(self, indices: slice | npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Write entries; those of a slice take a tenth of the time."""
        self._page[indices] = pages
        first = pages.astype(np.int32) * self.slots_per_page
        for slot in range(self.slots_per_page):
            self._by_index[indices, slot] = first + slot

    def assign(self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Map all logical blocks of some lease indices to any slots that the rank has leased."""
        indices = distinct(blocks // self.slots_per_page, self._page.size)
        self._leased[indices] = True
        self._page[indices] = UNMAPPED
        self._slots[blocks] = slots

    def all_slots(self) -> npt.NDArray[np.int32]:
        """Return the current table, (logical blocks,); only entries of leased indices are valid."""
        return self._slots.copy()

    def unmap(self, indices: npt.NDArray[np.int64]) -> None:
        """Give up lease indices."""
        self._leased[indices] = False

    def own_slots(self, blocks: list[int]) -> npt.NDArray[np.int32]:
        """Return the slots of logical blocks, (n,); asserts that all are leased."""
        numbers = np.asarray(blocks, dtype=np.int64)
        leased = self._leased[numbers // self.slots_per_page]
        assert leased.all(), "a step uses a block that is not leased."
        return self._slots[numbers]

    def slots(self, blocks: list[int]) -> list[int]:
        """Return where the engine has logical blocks; asserts that all are leased."""
        found = self.own_slots(blocks)
        if self._of_engine is not None:
            found = self._of_engine[found]
        return found.tolist()  # type: ignore[no-any-return]

"""The KV memory of engines in memory, and what copies between the ranks of a cell."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import Finish, Round, Units

LAYERS = 4
"""As many as the pipeline stages of the widest group."""

Words = npt.NDArray[np.int64]


class FakeKV:
    """A rank's KV memory: one word for each layer and KV head of each token.

    Words lie as in the product's memory: by layer, page, head and token.
    """

    def __init__(self, geometry: PageGeometry, num_pages: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        size = num_pages * geometry.num_layers * geometry.num_kv_heads * geometry.tokens_per_slot
        self.words: Words = np.zeros(size, dtype=np.int64)

    def read(self, units: Units, finest: Split) -> Words:
        """Return a copy of these units, (units, layers, words of their heads)."""
        rows, pages, columns = self._places(units, finest)
        found: Words = self._grid(finest)[rows, :, pages, columns]
        return found

    def put(self, units: Units, finest: Split, words: Words) -> None:
        """Overwrite these units with what `read` has returned of others."""
        rows, pages, columns = self._places(units, finest)
        self._grid(finest)[rows, :, pages, columns] = words

    def _grid(self, finest: Split) -> Words:
        """Return the memory by row of a page's units, layer, page and column."""
        layers = self.geometry.num_layers // finest.pp
        return self.words.reshape(finest.pp, layers, self.num_pages, finest.tp, -1)

    @staticmethod
    def _places(units: Units, finest: Split) -> tuple[Units, Units, Units]:
        pages, of_page = np.divmod(units, finest.width)
        return of_page // finest.tp, pages, of_page % finest.tp

    def blocks(self, split: Split) -> Words:
        """Return the memory, (blocks, heads, words of a head), as `Slots.first_blocks` counts."""
        slots = self.geometry.slots(split)
        return self.words.reshape(-1, slots.heads, self.words_per_head)

    @property
    def words_per_head(self) -> int:
        """Words of a head in one block and layer: one for each token."""
        return self.geometry.tokens_per_slot

    def regions(self, split: Split) -> Words:
        """Return how far each layer of a member lies from its first one, in blocks."""
        slots = self.geometry.slots(split)
        regions: Words = np.arange(slots.layers) * self.num_pages * slots.columns
        return regions

    def tokens(self, slots: list[int], split: Split) -> Words:
        """Return a copy, (tokens, layers, heads), of what these slots hold, in their order."""
        found = self.blocks(split)[np.array(slots)[:, None] + self.regions(split)]
        words: Words = found.transpose(0, 3, 1, 2).reshape(-1, *found.shape[1:3])
        return words

    def write(self, slots: list[int], split: Split, start: int, words: Words) -> None:
        """Write (tokens, layers, heads) words from token `start` on."""
        numbers = np.arange(start, start + len(words))
        block, offset = np.divmod(numbers, self.geometry.tokens_per_slot)
        at = np.array(slots)[block][:, None] + self.regions(split)
        self.blocks(split)[at, :, offset[:, None]] = words


class FakeMover:
    """Copies between the memories of the ranks of a cell."""

    is_one_sided = True

    def __init__(self, own: int, memory: Mapping[int, FakeKV]) -> None:
        """Numbers ranks as `memory` does."""
        self._own = own
        self._memory = memory

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Copy at once."""
        launched()
        moved = [0, 0]
        for source, (src, dst) in copies.get(self._own, {}).items():
            found = self._memory[source].read(src, finest)
            self._memory[self._own].put(dst, finest, found)
            moved[source == self._own] += found.nbytes
        return lambda: MoveStats(moved[0], moved[1], 0.0)

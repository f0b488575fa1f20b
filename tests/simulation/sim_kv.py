"""What lies in the pages of a simulated rank, so that KV which is not there is found out.

One word stands for one layer and KV head of one block: which computation made it, for which block
of the task, and how many of its tokens it covers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.move_stats import MoveStats
from kvadaptor.transfer.rounds import Finish, MoveError, Round
from tests.harness.worker.fake_kv import FakeKV, Words
from tests.simulation.fibers import FiberEnded

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank

KV_HEADS = 8
"""Every width divides this number."""

BLOCK_TOKENS = 4
GEOMETRY = PageGeometry(1, KV_HEADS, 1, 1, 1, BLOCK_TOKENS)
"""A block has a word of 8 bytes per head."""

STAGES = 4
"""The most pipeline stages of a group."""

GEOMETRY_OF_STAGES = PageGeometry(STAGES, KV_HEADS, 1, 1, 1, BLOCK_TOKENS)
"""Where pipeline groups are formed: each stage of the widest has a layer."""
_BLOCKS, _COUNTS, _SHARES = 64, 8, STAGES * KV_HEADS


class SimKV(FakeKV):
    """The KV memory of one process."""

    def __init__(self, geometry: PageGeometry, num_pages: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        size = num_pages * geometry.num_layers * KV_HEADS
        self.words: Words = np.zeros(size, dtype=np.int64)

    @property
    def words_per_head(self) -> int:
        """See `FakeKV`."""
        return 1


@dataclass(frozen=True, slots=True)
class Stay:
    """Whose KV a task has: that of its own stay, after that of others, one for each block."""

    number: int
    loaded: tuple[int, ...] = ()

    def of(self, block: int) -> int:
        """Return the stay that has computed a block."""
        return self.loaded[block] if block < len(self.loaded) else self.number


def words_of(stay: Stay, first: int, last: int, tokens: int, shares: Words) -> Words:
    """Return (blocks, shares): what blocks of a task hold when its first `tokens` have KV.

    A share is a layer times `KV_HEADS`, plus a head. Block `last` is the first that is left out.
    """
    if last - first == 1:
        count = min(BLOCK_TOKENS, tokens - first * BLOCK_TOKENS)
        of_one: Words = ((stay.of(first) * _BLOCKS + first) * _COUNTS + count) * _SHARES + shares
        return of_one[None]
    numbers = np.arange(first, last)
    stays = np.array([stay.of(each) for each in range(first, last)], dtype=np.int64)
    counts = np.minimum(BLOCK_TOKENS, tokens - numbers * BLOCK_TOKENS)
    words: Words = (((stays * _BLOCKS + numbers) * _COUNTS + counts) * _SHARES)[:, None] + shares
    return words


def is_full_block_of(stay: int, found: Words, shares: Words) -> bool:
    """Return whether these words, (shares,), are those of some full block of a stay."""
    number = int(found[0]) // _SHARES // _COUNTS % _BLOCKS
    wanted = words_of(Stay(stay), number, number + 1, (number + 1) * BLOCK_TOKENS, shares)
    return bool((found == wanted[0]).all())


class Copy:
    """Copies that a device has been given."""

    is_over = False


class SimMover:
    """Copies between the memories of a cell: at once, or when it is asked whether they are over."""

    is_one_sided = True

    def __init__(self, process: "SimRank") -> None:
        self._process = process

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """See `EngineMover`."""
        process, world = self._process, self._process.world
        if process.host.fiber.is_ending:
            raise FiberEnded
        if world.rng.random() < world.faults.move_fails:
            raise MoveError("the simulation says so")
        own = process.engine.spec.rank - process.engine.spec.first
        sources = copies.get(own, {})
        copy = Copy()
        process.engine.copies.append(copy)
        moved = [0, 0]

        def run() -> None:
            rows = [
                process.memory_of(source).read(src, finest) for source, (src, _) in sources.items()
            ]
            # All is read before anything is written, as from the pages of a round.
            for row, (source, (_, dst)) in zip(rows, sources.items(), strict=True):
                process.engine.kv.put(dst, finest, row)
                moved[source == own] += row.nbytes
            copy.is_over = True

        launched()
        if process.engine.is_synchronous:
            for _ in range(world.rng.randint(0, 2)):
                process.host.sleep(0.0)
            run()
        elif world.rng.random() < 0.5:
            run()

        def finish() -> MoveStats:
            if not copy.is_over:
                run()
            process.engine.copies.remove(copy)
            return MoveStats(moved[0], moved[1], 0.0)

        return finish

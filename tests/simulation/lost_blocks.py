"""What simulated groups enter of their full blocks, and load of those of lost groups.

Directories, entries, look-ups and copies are the product's. Here is the memory that they lie in,
and what a scheduler does with them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from comm_pool.layout import Rank
from kvadaptor.group_directory import GroupDirectory
from tests.harness.worker.fake_kv import FakeKV
from tests.harness.worker.fake_scheduler import FakeRequest
from tests.simulation.checkers import check
from tests.simulation.sim_kv import BLOCK_TOKENS
from worker.engine.lost_kv import PLACES, LostBlocks, LostKV
from worker.engine.scheduling.block_entries import BlockEntries

Bytes = npt.NDArray[np.uint8]
Content = tuple[tuple[int, ...], int, bytes]
"""The ranks of a group, a block, and the key of its entry."""


class Pieces:
    """Memory by name, of no process; see `CellMemory`."""

    def __init__(self) -> None:
        self._pieces: dict[str, bytearray] = {}

    def map(self, name: str, num_bytes: int, *, is_own: bool = True) -> bytearray:
        """See `CellMemory`."""
        return self._pieces.setdefault(name, bytearray(num_bytes))


class KVOfRanks(Mapping[Rank, Bytes]):
    """The KV memory of the ranks of a cell as bytes, (layers, bytes)."""

    def __init__(self, memory: Mapping[int, FakeKV], layers: int) -> None:
        self._memory = memory
        self._layers = layers

    def __getitem__(self, rank: Rank) -> Bytes:
        return self._memory[rank].words.view(np.uint8).reshape(self._layers, -1)

    def __iter__(self) -> Iterator[Rank]:
        return map(Rank, self._memory)

    def __len__(self) -> int:
        return len(self._memory)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Loaded KV that a member found to be wrong: it may be, if it is void."""

    block: int
    what: str


@dataclass(slots=True)
class Loads:
    """What a step loads; see `BlockCopies`."""

    lost_blocks: list[int] = field(default_factory=list)
    lost_places: list[int] = field(default_factory=list)
    lost_tags: list[int] = field(default_factory=list)
    tasks: set[str] = field(default_factory=set)
    """The tasks that load."""
    doubts: list[Doubt] = field(default_factory=list)
    void: set[int] = field(default_factory=set)
    """Blocks whose places have changed meanwhile."""


def extend_keys(keys: list[bytes], tokens: Sequence[int], blocks: int) -> list[bytes]:
    """Add the keys of a stream's full blocks up to this number; each stands for all before it."""
    for at in range(len(keys), min(blocks, len(tokens) // BLOCK_TOKENS)):
        before = keys[-1] if keys else b""
        own = np.array(tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS], dtype=np.int64)
        keys.append(hashlib.blake2b(before + own.tobytes(), digest_size=32).digest())
    return keys


class GroupBlocks:
    """One scheduler's full blocks in the directory of its group, and what its tasks load."""

    block_size = BLOCK_TOKENS

    def __init__(self, directory: GroupDirectory, lost: LostKV, stays: dict[Content, int]) -> None:
        """`stays` has, of the whole cell, who has computed each entry."""
        self.directory = directory
        self.entries = BlockEntries(directory)
        self.loads = Loads()
        """Those of the step that is planned next."""
        self._lost = lost
        self._source = LostBlocks(self, lost)
        self._stays = stays

    def add(self, block: int, key: bytes, stay: int) -> None:
        """Enter a block that a stay has computed after the step that is planned next."""
        self._stays[self.directory.shape.ranks, block, key] = stay
        self.entries.add(block, key)

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return places of these blocks, up to the first that is nowhere, and their stays."""
        self._source.refresh()
        found: list[tuple[int, int]] = []
        for key in keys:
            if (place := self._source.take(key)) is None:
                break
            number, block = divmod(place, PLACES)
            ranks = self._lost.directories[number].shape.ranks
            found.append((place, self._stays[ranks, block, key]))
        return found if self._source.is_sooner(len(found) * BLOCK_TOKENS) else []

    def take_inherited(self) -> list[tuple[int, int]]:
        """Return the blocks that the group has of an earlier process, and their stays."""
        ranks, found = self.directory.shape.ranks, self.directory.take_inherited()
        return [(block, self._stays[ranks, block, key]) for block, key in found.items()]

    def load(self, request: FakeRequest, places: list[int]) -> None:
        """Let the step that is planned next load these places into a task's first blocks."""
        self._source.load(self.loads, request.name, request.blocks[: len(places)], places)
        self.loads.tasks.add(request.name)

    def take_loads(self) -> Loads:
        """Return what the step loads that is being planned."""
        loads, self.loads = self.loads, Loads()
        return loads

    def look_again(self, loads: Loads) -> set[int]:
        """Return which blocks of a finished step are void; raises if others are wrong."""
        loads.void = self._source.gone(loads)
        for each in loads.doubts:
            check(each.block in loads.void, each.what)
        return loads.void

"""A rank's access to the KV of groups that have lost a member: it copies whole blocks of it.

The memory of CPU ranks outlives their processes, and so does the directory of each group. Tasks of
a lost group continue on its blocks, in a group of any width, without computing them again. A copy
counts once the directory still shows the same afterwards: a lost rank that lives may go on, and a
new process empties the memory of its predecessor.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

from comm_pool.cpu.cell_memory import directory_name, kv_name
from comm_pool.layout import Rank
from comm_pool.plan import communicator_plan
from kvadaptor.geometry import PageGeometry
from kvadaptor.group_directory import DirectoryShape, GroupDirectory
from kvadaptor.host.layout import HASH_BYTES
from kvadaptor.slot_table import SlotTable

Bytes = npt.NDArray[np.uint8]

PLACES = 1 << 32
"""A place is the number of a directory, times this, plus a block."""

VERSIONS = 1 << 32
"""A tag is a formation, times this, plus the version of an entry in it."""


class Memory(Protocol):
    """Memory that outlives its processes; `CellMemory` is."""

    def map(self, name: str, num_bytes: int, *, is_own: bool = True) -> mmap.mmap | bytearray:
        """Map a piece by its name; pieces of others are read-only."""


class LostCopies(Protocol):
    """What a step copies of lost groups; `BlockCopies` is."""

    lost_blocks: list[int]
    lost_places: list[int]
    lost_tags: list[int]


class BlockSize(Protocol):
    """What `LostBlocks` reads of a scheduler."""

    block_size: int


def open_directories(
    memory: Memory, rank: Rank, world: int, num_pages: int, slots_per_page: Mapping[int, int]
) -> tuple[GroupDirectory, ...]:
    """Map the directories of all groups, in one order on all ranks.

    `num_pages` are the pages of a rank, `slots_per_page` those of a page by width. A new process
    gives up all that its predecessor had.
    """
    alone = [(Rank(each),) for each in range(world)]
    groups = [*alone, *communicator_plan(world, tuple(slots_per_page))]
    opened = []
    for ranks in groups:
        if len(ranks) not in slots_per_page:
            continue
        sizes = DirectoryShape(ranks, num_pages, slots_per_page[len(ranks)])
        is_member = rank in ranks
        mapped = memory.map(directory_name(ranks), sizes.num_bytes, is_own=is_member)
        opened.append(GroupDirectory(memoryview(mapped), sizes))
        if is_member:
            opened[-1].give_up(rank)
    return tuple(opened)


@dataclass(slots=True)
class LostKV:
    """The KV of lost groups as one rank reads it, and what it counts of it since it started."""

    directories: tuple[GroupDirectory, ...]
    geometry: PageGeometry
    rank: Rank
    kv: Mapping[Rank, Bytes]
    """The KV memory of each rank, (layers, bytes of one layer); only its own is written."""
    hit_tokens: int = 0
    """Tokens that tasks took from lost groups instead of computing them."""
    loaded_bytes: int = 0
    _present: dict[Rank, int] = field(default_factory=dict)
    _read: dict[int, int] = field(default_factory=dict)
    """The formation of each directory that was read."""
    _places: dict[bytes, int] = field(default_factory=dict)
    _tags: dict[int, int] = field(default_factory=dict)
    """The tag of each place."""

    def directory_of(self, ranks: tuple[Rank, ...]) -> GroupDirectory | None:
        """Return the directory of this group, if it has one."""
        return next((each for each in self.directories if each.shape.ranks == ranks), None)

    def distrust(self) -> None:
        """Let nobody read this rank's own pages: what they hold may be wrong."""
        for each in self.directories:
            if self.rank in each.shape.ranks:
                each.give_up(self.rank)

    def know(self, present: Mapping[Rank, int]) -> None:
        """Take note of the processes of the cell: the incarnation of each rank."""
        if present != self._present:
            self._present = dict(present)
            self._read.clear()
            self._places.clear()
            self._tags.clear()

    def refresh(self) -> None:
        """Read the directories of lost groups that were not read yet."""
        for number, directory in enumerate(self.directories):
            formation = directory.formation
            if not formation or self._read.get(number) == formation:
                continue
            members = [self._present.get(Rank(rank)) for rank in directory.shape.ranks]
            if not directory.is_lost(members):
                continue
            self._read[number] = formation
            versions = directory.versions()
            blocks, keys = directory.entries()
            for block, key in zip(blocks, keys, strict=True):
                place = number * PLACES + block
                self._places[key] = place
                self._tags[place] = formation * VERSIONS + int(versions[block])

    def find(self, key: bytes) -> int | None:
        """Return the place of this block, as last refreshed; None if it is nowhere."""
        place = self._places.get(key.ljust(HASH_BYTES, b"\0"))
        if place is None or not self.is_there(place, self._tags[place]):
            return None
        return place

    def is_there(self, place: int, tag: int) -> bool:
        """Return whether a place has held the same since it had this tag."""
        number, block = divmod(place, PLACES)
        formation, version = divmod(tag, VERSIONS)
        directory = self.directories[number]
        return directory.formation == formation and directory.is_same(block, version)

    def tag_of(self, place: int) -> int:
        """Return the tag of a found place; another one means that it may hold another block."""
        return self._tags[place]

    def loader(
        self, step: LostCopies, width: int, member: int, table: SlotTable | None
    ) -> Callable[[], None]:
        """Return a call that copies a step's blocks for a member; its slots are those of now."""
        into = table.slots(step.lost_blocks) if table is not None else step.lost_blocks
        pairs = sorted(zip(step.lost_places, into, strict=True))

        def load() -> None:
            for number, part in groupby(pairs, lambda pair: pair[0] // PLACES):
                found = list(part)
                blocks = np.array([place % PLACES for place, _ in found], dtype=np.int64)
                slots = np.array([slot for _, slot in found], dtype=np.int64)
                self._copy(self.directories[number], blocks, slots, width, member)

        return load

    def _copy(
        self,
        directory: GroupDirectory,
        blocks: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        width: int,
        member: int,
    ) -> None:
        """Copy the heads that a member of a group of this width holds, into its slots."""
        shape, here = directory.shape, self.geometry.slots_per_page(width)
        there = shape.slots_per_page
        # A unit has the heads that lie in one slot in both widths.
        units = max(here, there)
        per_slot, per_source = units // here, units // there
        first = member * here // width * per_slot
        unit_bytes = self.geometry.layer_page_bytes // units
        for unit in range(per_slot):
            share = (first + unit) // per_source
            # Of members with the same heads, the first.
            place = -(-share * shape.width // there)
            source = directory.slots(place, blocks) * per_source + (first + unit) % per_source
            read = self._units(Rank(shape.ranks[place]), unit_bytes)
            self._units(self.rank, unit_bytes)[:, slots * per_slot + unit] = read[:, source]
        self.loaded_bytes += blocks.size * per_slot * unit_bytes * self.geometry.num_layers

    def _units(self, rank: Rank, unit_bytes: int) -> Bytes:
        kv = self.kv[rank]
        return kv.reshape(kv.shape[0], -1, unit_bytes)

    def totals(self) -> tuple[tuple[str, int], ...]:
        """Return what the rank has counted."""
        return ("lost_hits", self.hit_tokens), ("lost_loaded_bytes", self.loaded_bytes)


class LostBlocks:
    """One scheduler's source of the blocks of lost groups."""

    def __init__(self, scheduler: BlockSize, kv: LostKV) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self.refresh = kv.refresh
        self.take = kv.find

    def let_go(self, places: Iterable[int]) -> None:
        """Do nothing: what is gone after the copies does not count."""

    def is_sooner(self, tokens: int) -> bool:
        """Return True: a copy reads a few bytes where a step reads all weights."""
        return tokens > 0

    def load(self, step: LostCopies, name: str, blocks: list[int], places: list[int]) -> None:
        """Let a step load these places into a task's blocks."""
        step.lost_blocks += blocks
        step.lost_places += places
        step.lost_tags += map(self._kv.tag_of, places)
        self._kv.hit_tokens += len(blocks) * self._scheduler.block_size

    def goes_ahead(self, tokens: int) -> bool:
        """Return False: a step copies what it loads."""
        return False

    def load_ahead(self, step: LostCopies, name: str, blocks: list[int], places: list[int]) -> None:
        """Never called, as nothing goes ahead."""
        raise NotImplementedError

    def gone(self, step: LostCopies) -> set[int]:
        """Return the blocks of a finished step whose places have changed meanwhile."""
        there = map(self._kv.is_there, step.lost_places, step.lost_tags)
        return {
            block for block, is_there in zip(step.lost_blocks, there, strict=True) if not is_there
        }


def open_lost_kv(
    memory: Memory,
    rank: Rank,
    world: int,
    directories: tuple[GroupDirectory, ...],
    geometry: PageGeometry,
    own: Bytes,
) -> LostKV:
    """Map the KV of all ranks of the cell; `own` is the rank's, (layers, bytes of one layer)."""
    found = {rank: own}
    for each in map(Rank, range(world)):
        if each != rank:
            mapped = memory.map(kv_name(each), own.size, is_own=False)
            found[each] = np.frombuffer(mapped, np.uint8).reshape(len(own), -1)
    return LostKV(directories, geometry, rank, found)

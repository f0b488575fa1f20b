"""A rank's access to the KV of groups that have lost a member: it copies whole blocks of it.

The memory of ranks outlives their processes, and so does the directory of each group. Tasks of
a lost group continue on its blocks, in a group of any width, without computing them again. A copy
counts once the directory still shows the same afterwards: a lost rank that lives may go on, and a
new process uses the memory of its predecessor.
"""

import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np

from comm_pool.cpu.cell_memory import directory_name, kv_name
from comm_pool.layout import Rank, lease_key
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import DirectoryShape, GroupDirectory, Numbers
from kvadaptor.host.layout import HASH_BYTES
from kvadaptor.slot_table import SlotTable
from worker.engine.lost_copies import ArrayPageCopies, Bytes, LostPageCopies

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
    memory: Memory,
    rank: Rank,
    world: int,
    num_pages: int,
    geometry: PageGeometry,
    splits: Collection[Split],
    *,
    is_trusted: bool = True,
) -> tuple[GroupDirectory, ...]:
    """Map the directories of all groups of these splits, in one order on all ranks.

    `num_pages` are the pages of a rank. A new process takes over what its predecessor had, if that
    is trusted.
    """
    opened = []
    for split in sorted(splits):
        slots = geometry.slots(split).count
        for first in range(0, world - split.width + 1, split.width):
            key = lease_key(tuple(map(Rank, range(first, first + split.width))), split.pp)
            sizes = DirectoryShape(key, num_pages, slots, split.pp)
            is_member = rank in key
            mapped = memory.map(directory_name(key), sizes.num_bytes, is_own=is_member)
            opened.append(GroupDirectory(memoryview(mapped), sizes))
            if is_member:
                opened[-1].take_over(rank, is_trusted=is_trusted)
    return tuple(opened)


def inherited_pages(directories: Iterable[GroupDirectory], rank: Rank) -> Numbers:
    """Return the pages whose content a rank keeps from its predecessor, ascending."""
    own = (each.inherited_pages for each in directories if each.shape.ranks == (rank,))
    return next(own, np.zeros(0, dtype=np.int64))


@dataclass(slots=True)
class LostKV:
    """The KV of lost groups as one rank reads it, and what it counts of it since it started."""

    directories: tuple[GroupDirectory, ...]
    rank: Rank
    copies: LostPageCopies
    hit_tokens: int = 0
    """Tokens that tasks took from lost groups instead of computing them."""
    loaded_bytes: int = 0
    _present: dict[Rank, int] = field(default_factory=dict)
    _read: dict[int, int] = field(default_factory=dict)
    """The formation of each directory that was read."""
    _places: dict[bytes, int] = field(default_factory=dict)
    _tags: dict[int, int] = field(default_factory=dict)
    """The tag of each place."""

    def directory_of(self, key: tuple[Rank, ...]) -> GroupDirectory | None:
        """Return the directory of the group whose lease has this key, if it has one."""
        return next((each for each in self.directories if each.shape.ranks == key), None)

    @property
    def inherits(self) -> bool:
        """Whether this rank alone has blocks of its predecessor that no group has begun with."""
        return bool(inherited_pages(self.directories, self.rank).size)

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
        self, step: LostCopies, split: Split, member: int, table: SlotTable | None
    ) -> Callable[[], None]:
        """Return a call that copies a step's blocks for a member; its slots are those of now."""
        blocks = step.lost_blocks
        into = table.own_slots(blocks).tolist() if table is not None else blocks
        pairs = sorted(zip(step.lost_places, into, strict=True))

        def load() -> None:
            for number, part in groupby(pairs, lambda pair: pair[0] // PLACES):
                found = list(part)
                theirs = np.array([place % PLACES for place, _ in found], dtype=np.int64)
                own = np.array([each for _, each in found], dtype=np.int64)
                copied = self.copies.copy(self.directories[number], theirs, own, split, member)
                self.loaded_bytes += copied

        return load

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
    """Map the KV of all ranks of a CPU cell; `own` is the rank's, (layers, bytes of one layer)."""
    found = {rank: own}
    for each in map(Rank, range(world)):
        if each != rank:
            mapped = memory.map(kv_name(each), own.size, is_own=False)
            found[each] = np.frombuffer(mapped, np.uint8).reshape(len(own), -1)
    return LostKV(directories, rank, ArrayPageCopies(geometry, rank, found))

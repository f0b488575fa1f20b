"""Which full blocks lie in the device pages of a group, in memory that outlives its processes.

The group's leader writes the blocks, each member where it has them and whether it still does. Other
ranks read it once the group has lost a member: its tasks continue on them without computing these
blocks again. No lock is shared, so a process may end at any instruction. Invariants:

- An entry is valid only after the step that fills its block, and no more before a step that writes
  to the block again.
- A member withdraws its marks of the blocks in a page, or of all, before the page gets other
  content. All marks belong to one formation and do not come back in it. So a reader that finds
  entry and marks unchanged after its copies has copied that block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvadaptor.fence import FENCE
from kvadaptor.geometry import Split
from kvadaptor.host.layout import HASH_BYTES

Numbers = npt.NDArray[np.int64]

CACHED, HELD = 1, 2
"""States of a valid entry: its block is free, and can be hit; a task holds it."""

_WORD_BYTES = 8
_FORMATION, _FROZEN = range(2)
_HEADER_WORDS = 2


@dataclass(frozen=True, slots=True)
class DirectoryShape:
    """The sizes of a group's directory: its ranks, the pages of each, the slots of a page.

    `ranks` are in the order of what they hold: their layers, then their heads. So they ascend in a
    group without pipeline stages.
    """

    ranks: tuple[int, ...]
    num_pages: int
    slots_per_page: int
    stages: int = 1

    @property
    def width(self) -> int:
        """The number of members, k."""
        return len(self.ranks)

    @property
    def split(self) -> Split:
        """How the group divides the KV of its tasks."""
        return Split(self.stages, self.width // self.stages)

    @property
    def blocks(self) -> int:
        """The number of logical blocks, B."""
        return self.num_pages * self.slots_per_page

    @property
    def offsets(self) -> tuple[int, ...]:
        """The bytes at which words, marks, states, versions, hashes and slots begin, and end."""
        words = _WORD_BYTES * (_HEADER_WORDS + 2 * self.width)
        versions, hashes = _WORD_BYTES * self.blocks, HASH_BYTES * self.blocks
        sizes = (words, self.width * self.blocks, self.blocks, versions, hashes)
        slots = 4 * self.width * self.blocks if self.width > 1 else 0
        at = [0]
        for size in (*sizes, slots):
            at.append(at[-1] + -(-size // _WORD_BYTES) * _WORD_BYTES)
        return tuple(at)

    @property
    def num_bytes(self) -> int:
        """The size of all."""
        return self.offsets[-1]


class GroupDirectory:
    """The directory of one group, for its members and for readers.

    `memory` has `shape.num_bytes` bytes, zeros at first; that of a reader may be read-only.
    """

    def __init__(self, memory: memoryview, shape: DirectoryShape) -> None:
        self.shape = shape
        words, marks, states, versions, hashes, slots, end = shape.offsets
        k, blocks = shape.width, shape.blocks
        whole = np.frombuffer(memory, np.uint8, shape.num_bytes)
        self._words = whole[words : _WORD_BYTES * (_HEADER_WORDS + 2 * k)].view(np.int64)
        self._marks = whole[marks : marks + k * blocks].reshape(k, blocks)
        self._states = whole[states : states + blocks]
        self._versions = whole[versions : versions + _WORD_BYTES * blocks].view(np.int64)
        self._hashes = whole[hashes : hashes + HASH_BYTES * blocks].reshape(blocks, HASH_BYTES)
        self._slots = whole[slots:end].view(np.int32).reshape(k, blocks) if k > 1 else None
        self._members = self._words[_HEADER_WORDS : _HEADER_WORDS + k]
        self._intact = self._words[_HEADER_WORDS + k :]
        self._is_led = False
        """Whether this process leads the group, and enters its blocks."""
        self._inherited: dict[int, bytes] = {}

    # ------------------------------------------------------------------ the leader

    def begin(self, formation: int, members: Sequence[int]) -> None:
        """Begin empty for a formation, whose members have these incarnations."""
        with FENCE:
            self._words[_FORMATION] = 0
        self._states[:] = 0
        self._members[:] = members
        self._words[_FROZEN] = 0
        with FENCE:
            self._words[_FORMATION] = formation
        self._is_led = True

    def freeze(self) -> None:
        """Leave it as it is until `begin`: no step of the formation counts any more."""
        if self._is_led:
            self._is_led = False
            self._words[_FROZEN] = 1

    def fill(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Enter (n,) blocks, which tasks hold, with the hashes of their content."""
        if not self._is_led or not blocks:
            return
        numbers = np.array(blocks, dtype=np.int64)
        text = b"".join(each.ljust(HASH_BYTES, b"\0") for each in keys)
        self._hashes[numbers] = np.frombuffer(text, np.uint8).reshape(-1, HASH_BYTES)
        with FENCE:
            self._states[numbers] = HELD

    def clear(self, block: int) -> None:
        """Remove the entry of a block: a later step writes to it."""
        if self._is_led and self._states[block]:
            with FENCE:
                self._states[block] = 0
                self._versions[block] += 1
            with FENCE:
                pass

    def hold(self, blocks: Iterable[int]) -> None:
        """Note that tasks hold these blocks, if they have entries."""
        self._turn(blocks, CACHED, HELD)

    def release(self, blocks: Iterable[int]) -> None:
        """Note that no task holds these blocks any more; their content stays."""
        self._turn(blocks, HELD, CACHED)

    def _turn(self, blocks: Iterable[int], old: int, new: int) -> None:
        if not self._is_led:
            return
        numbers = np.fromiter(blocks, dtype=np.int64)
        self._states[numbers[self._states[numbers] == old]] = new

    # ------------------------------------------------------------------ each member

    def keep(self, rank: int, formation: int, slots: npt.NDArray[np.int32] | None) -> None:
        """Mark that a member has all blocks; `slots` (B,) is its table, None in dp."""
        place = self.shape.ranks.index(rank)
        self._intact[place] = 0
        if slots is not None and self._slots is not None:
            # Of a rank with fewer pages than the directory has room for.
            self._slots[place, : slots.size] = slots
        self._marks[place] = 1
        with FENCE:
            self._intact[place] = formation

    def take_over(self, rank: int, *, is_trusted: bool = True) -> None:
        """Withdraw all marks of a member's predecessor; call it before its pages change.

        A rank alone inherits the blocks that it has as the predecessor left them: `inherited_pages`
        have only blocks with their hashes, and may be hit once the group begins. It inherits
        nothing of a predecessor that is not trusted.
        """
        inherited: dict[int, bytes] = {}
        if is_trusted and self.shape.width == 1 and self.formation:
            inherited = dict(zip(*self.entries(), strict=True))
        self.give_up(rank)
        self._inherited = inherited

    @property
    def inherited_pages(self) -> Numbers:
        """The pages with blocks that are inherited and not taken yet, ascending."""
        blocks = np.fromiter(self._inherited, dtype=np.int64)
        pages: Numbers = np.unique(blocks // self.shape.slots_per_page)
        return pages

    def take_inherited(self) -> dict[int, bytes]:
        """Return the inherited blocks that no page has lost since, and their padded hashes; once.

        From then on they are the group's own, which the leader enters.
        """
        inherited, self._inherited = self._inherited, {}
        return inherited

    def give_up(self, rank: int, blocks: Numbers | npt.NDArray[np.bool_] | None = None) -> None:
        """Withdraw a member's marks of these blocks, or all; then their slots may change.

        The blocks are (n,) numbers, or a mask of (B,).
        """
        place = self.shape.ranks.index(rank)
        with FENCE:
            if blocks is None:
                self._intact[place] = 0
                self._inherited.clear()
            else:
                self._marks[place][blocks] = 0
        with FENCE:
            pass

    def give_up_pages(self, rank: int, pages: Numbers) -> None:
        """Withdraw a member's marks of all blocks that it has in these (n,) pages.

        A migration may have put the blocks of one lease index into several pages.
        """
        place = self.shape.ranks.index(rank)
        if self._inherited:
            lost, size = set(pages.tolist()), self.shape.slots_per_page
            blocks = self._inherited.items()
            self._inherited = {n: key for n, key in blocks if n // size not in lost}
        if not self._intact[place]:
            return
        changes = np.zeros(self.shape.num_pages, dtype=np.bool_)
        changes[pages] = True
        has_changed = np.repeat(changes, self.shape.slots_per_page)
        if self._slots is not None:
            has_changed = np.take(has_changed, self._slots[place])
        self.give_up(rank, has_changed)

    # ------------------------------------------------------------------ readers

    @property
    def formation(self) -> int:
        """The formation that it can be read for, with the pages of all members; 0: it cannot."""
        formation = int(self._words[_FORMATION])
        return formation if formation and (self._intact == formation).all() else 0

    def is_lost(self, members: Sequence[int | None]) -> bool:
        """Return whether it is frozen, or the incarnations of its ranks are others by now."""
        return bool(self._words[_FROZEN]) or list(members) != self._members.tolist()

    def held_pages(self, rank: int) -> Numbers:
        """Return the pages in which a member has blocks that tasks hold, ascending."""
        slots = self.slots(self.shape.ranks.index(rank), np.flatnonzero(self._states == HELD))
        pages: Numbers = np.unique(slots // self.shape.slots_per_page)
        return pages

    def entries(self) -> tuple[list[int], list[bytes]]:
        """Return the blocks with a valid entry that all members have, and their hashes."""
        numbers = np.flatnonzero(self._states)
        numbers = numbers[self.are_valid(numbers)]
        text = self._hashes[numbers].tobytes()
        keys = [text[at : at + HASH_BYTES] for at in range(0, len(text), HASH_BYTES)]
        return numbers.tolist(), keys

    def are_valid(self, blocks: Numbers) -> npt.NDArray[np.bool_]:
        """Return, per block, whether its entry is valid and all members have it."""
        with FENCE:
            marks = self._marks[:, blocks]
            valid: npt.NDArray[np.bool_] = (self._states[blocks] != 0) & marks.all(axis=0)
        return valid

    def versions(self) -> Numbers:
        """Return how often each block (B,) has lost an entry; read before what is to be the same.

        An entry may come back with other content, as the group of a rank out of reach goes on.
        """
        with FENCE:
            return self._versions.copy()

    def is_same(self, block: int, version: int) -> bool:
        """Return whether an entry is valid, as all that time, and all members have it."""
        is_valid = bool(self.are_valid(np.array([block], dtype=np.int64))[0])
        return is_valid and int(self._versions[block]) == version

    def slots(self, place: int, blocks: Numbers) -> Numbers:
        """Return the slots in which the member at `place` has these blocks."""
        if self._slots is None:
            return blocks
        slots: Numbers = self._slots[place, blocks].astype(np.int64)
        return slots

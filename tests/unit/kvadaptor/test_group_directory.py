"""The block directory of a group, rule by rule."""

import numpy as np
import pytest

from kvadaptor.group_directory import CACHED, HELD, DirectoryShape, GroupDirectory

PAGES = 6
KEYS = [bytes([number]) * 32 for number in range(16)]


class Pair:
    """A tp2's directory, as its leader (rank 2), its follower (3) and a reader see it."""

    def __init__(self, ranks: tuple[int, ...] = (2, 3)) -> None:
        self.shape = DirectoryShape(ranks, PAGES, len(ranks))
        self.memory = memory = memoryview(bytearray(self.shape.num_bytes))
        self.leader = GroupDirectory(memory, self.shape)
        self.follower = GroupDirectory(memory, self.shape)
        self.reader = GroupDirectory(memory.toreadonly(), self.shape)

    def begin(self, formation: int = 7) -> None:
        self.leader.begin(formation, range(10, 10 + self.shape.width))
        for place, rank in enumerate(self.shape.ranks):
            slots = np.arange(self.shape.blocks, dtype=np.int32) + 100 * place
            self.follower.keep(rank, formation, slots if self.shape.width > 1 else None)

    def readable(self) -> list[int]:
        return self.reader.entries()[0] if self.reader.formation else []


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.begin()
    return made


def test_entries_are_read_with_their_hashes_and_slots(pair: Pair) -> None:
    pair.leader.fill([3, 5], KEYS[:2])
    assert pair.reader.formation == 7
    assert pair.reader.entries() == ([3, 5], KEYS[:2])
    assert pair.reader.slots(1, np.array([5])).tolist() == [105]
    assert pair.reader.slots(0, np.array([5])).tolist() == [5]


def test_a_block_of_a_rank_alone_is_its_own_slot() -> None:
    alone = Pair((4,))
    alone.begin()
    alone.leader.fill([3], [b"short"])
    assert alone.reader.entries() == ([3], [b"short".ljust(32, b"\0")])
    assert alone.reader.slots(0, np.array([3])).tolist() == [3]


def test_it_is_read_once_all_members_have_begun() -> None:
    pair = Pair()
    pair.leader.begin(7, (1, 2))
    pair.leader.fill([3], KEYS[:1])
    assert not pair.reader.formation
    slots = np.arange(pair.shape.blocks, dtype=np.int32)
    pair.leader.keep(2, 7, slots)
    assert not pair.reader.formation
    pair.follower.keep(3, 6, slots)
    assert not pair.reader.formation, "the follower is in another formation"
    pair.follower.keep(3, 7, slots)
    assert pair.readable() == [3]


def test_a_block_that_gets_other_content_has_no_entry(pair: Pair) -> None:
    pair.leader.fill([3, 4], KEYS[:2])
    pair.leader.clear(3)
    assert pair.readable() == [4]
    assert pair.reader.are_valid(np.array([3, 4])).tolist() == [False, True]


def test_a_new_formation_begins_empty(pair: Pair) -> None:
    pair.leader.fill([3], KEYS[:1])
    pair.begin(8)
    assert pair.reader.formation == 8
    assert not pair.readable()


def test_pages_that_change_take_their_blocks_with_them() -> None:
    """The follower has block b in slot b + 1."""
    pair = Pair()
    pair.leader.begin(7, (10, 11))
    pair.leader.keep(2, 7, np.arange(pair.shape.blocks, dtype=np.int32))
    table = np.roll(np.arange(pair.shape.blocks, dtype=np.int32), -1)
    pair.follower.keep(3, 7, table)
    pair.leader.fill([2, 3, 4, 6], KEYS[:4])
    # Slots 4 and 5 are in page 2; the follower has blocks 3 and 4 there.
    pair.follower.give_up_pages(3, np.array([2]))
    assert pair.readable() == [2, 6], "block 2 shares an index with block 3, but not its page"
    pair.leader.give_up_pages(2, np.array([1]))
    assert pair.readable() == [6]
    alone = Pair((4,))
    alone.begin()
    alone.leader.fill([3, 4], KEYS[:2])
    alone.leader.give_up_pages(4, np.array([4]))
    assert alone.readable() == [3]


def test_a_frozen_one_stays_as_it_is(pair: Pair) -> None:
    pair.leader.fill([3, 4], KEYS[:2])
    pair.leader.freeze()
    pair.leader.clear(3)
    pair.leader.release([4])
    pair.leader.fill([5], KEYS[2:3])
    assert pair.readable() == [3, 4]
    assert pair.reader.held_pages(2).tolist() == [1, 2]


def test_members_give_up_blocks_or_all(pair: Pair) -> None:
    pair.leader.fill([2, 3, 4], KEYS[:3])
    pair.follower.give_up(3, np.array([2, 3]))
    assert pair.readable() == [4]
    pair.follower.give_up(3)
    assert not pair.reader.formation


def test_an_entry_that_comes_back_is_another_one(pair: Pair) -> None:
    pair.leader.fill([2, 3], KEYS[:2])
    versions = pair.reader.versions()
    assert pair.reader.is_same(2, versions[2])
    pair.leader.clear(2)
    assert not pair.reader.is_same(2, versions[2])
    pair.leader.fill([2], KEYS[:1])
    assert not pair.reader.is_same(2, versions[2])
    assert pair.reader.is_same(2, pair.reader.versions()[2])
    assert pair.reader.is_same(3, versions[3])
    pair.follower.give_up(3, np.array([3]))
    assert not pair.reader.is_same(3, versions[3])


def test_held_blocks_are_told_from_cached_ones(pair: Pair) -> None:
    pair.leader.fill([2, 5], KEYS[:2])
    assert pair.reader.held_pages(2).tolist() == [1, 2]
    pair.leader.release([5, 8])
    assert pair.reader.held_pages(2).tolist() == [1]
    assert pair.readable() == [2, 5], "a free block keeps its content"
    pair.leader.hold([5, 8])
    assert pair.reader.held_pages(2).tolist() == [1, 2]
    assert not pair.reader.are_valid(np.array([8])).any(), "block 8 has no entry"
    assert (CACHED, HELD) == (1, 2)


def test_a_group_is_lost_without_one_of_its_processes(pair: Pair) -> None:
    assert not pair.reader.is_lost((10, 11))
    assert pair.reader.is_lost((10, 12)), "a new process"
    assert pair.reader.is_lost((10, None)), "a missing one"
    pair.leader.freeze()
    assert pair.reader.is_lost((10, 11)), "no step counts any more"
    pair.begin(8)
    assert not pair.reader.is_lost((10, 11))


def test_another_process_of_the_group_reads_what_the_first_has_left(pair: Pair) -> None:
    pair.leader.fill([3], KEYS[:1])
    again = GroupDirectory(pair.memory, pair.shape)
    assert again.entries() == ([3], KEYS[:1])
    again.clear(3)
    assert again.entries() == ([3], KEYS[:1]), "it leads only after it has begun"


def alone(blocks: list[int]) -> Pair:
    """The directory of rank 4 alone, whose process has entered these blocks and ended."""
    made = Pair((4,))
    made.begin()
    made.leader.fill(blocks, KEYS[: len(blocks)])
    return made


def test_the_next_process_of_a_rank_alone_inherits_its_blocks_once() -> None:
    ended = alone([1, 3])
    later = GroupDirectory(ended.memory, ended.shape)
    later.take_over(4)
    assert not ended.readable(), "its pages may change from now on"
    assert later.inherited_pages.tolist() == [1, 3]
    assert later.take_inherited() == {1: KEYS[0], 3: KEYS[1]}
    assert not later.inherited_pages.size
    assert later.take_inherited() == {}


def test_what_was_not_trusted_is_not_inherited() -> None:
    ended = alone([1, 3])
    ended.follower.give_up(4, np.array([3]))
    later = GroupDirectory(ended.memory, ended.shape)
    later.take_over(4)
    assert later.take_inherited() == {1: KEYS[0]}
    ended = alone([1])
    ended.follower.give_up(4)
    later = GroupDirectory(ended.memory, ended.shape)
    later.take_over(4)
    assert later.take_inherited() == {}
    ended = alone([1])
    later = GroupDirectory(ended.memory, ended.shape)
    later.take_over(4, is_trusted=False)
    assert later.take_inherited() == {}
    assert not ended.readable()


def test_pages_that_have_changed_are_not_inherited() -> None:
    ended = alone([1, 3, 5])
    later = GroupDirectory(ended.memory, ended.shape)
    later.take_over(4)
    later.give_up_pages(4, np.array([0, 3]))
    assert later.inherited_pages.tolist() == [1, 5]
    later.give_up(4)  # Another group begins in these pages.
    assert later.take_inherited() == {}


def test_a_member_of_a_wide_group_inherits_nothing(pair: Pair) -> None:
    """The other halves of its blocks are in the pages of others, who go on."""
    pair.leader.fill([3], KEYS[:1])
    pair.follower.take_over(3)
    assert pair.follower.take_inherited() == {}
    assert not pair.readable()

"""Blocks of a lost group in the layout of any other, and the entries that lead to them."""

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import DirectoryShape, GroupDirectory
from kvadaptor.slot_table import SlotTable
from tests.harness.worker.kv_copies import CopyKind, copies_of
from worker.engine.lost_copies import ArrayPageCopies
from worker.engine.lost_kv import PLACES, LostBlocks, LostKV
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.block_entries import BlockEntries

PAGES = 5
LAYERS = 2
WORLD = 4
FORMATION = 3


def key_of(block: int) -> bytes:
    return bytes([block + 1]) * 32


class Cell:
    """Ranks whose KV has, in each unit, a number for its layer, block and heads."""

    def __init__(self, heads: int) -> None:
        self.geometry = PageGeometry(LAYERS, heads, 4, 4, 1, 2)
        size = PAGES * self.geometry.layer_page_bytes
        self.kv = {Rank(each): np.zeros((LAYERS, size), np.uint8) for each in range(WORLD)}

    def of_group(self, ranks: tuple[int, ...]) -> GroupDirectory:
        """A group in which block b has slot B - 1 - b of its first member, b of the others."""
        slots = self.geometry.slots_per_page(len(ranks))
        shape = DirectoryShape(ranks, PAGES, slots)
        directory = GroupDirectory(memoryview(bytearray(shape.num_bytes)), shape)
        directory.begin(FORMATION, [1] * len(ranks))
        for place, rank in enumerate(ranks):
            table = np.arange(shape.blocks, dtype=np.int32)
            table = table[::-1].copy() if place == 0 else table
            directory.keep(rank, FORMATION, table if len(ranks) > 1 else None)
            for block in range(shape.blocks):
                slot = int(table[block]) if len(ranks) > 1 else block
                heads = self.heads(place, len(ranks))
                self.rows(Rank(rank), len(ranks))[:, slot] = self.content(block, heads)
        return directory

    def heads(self, member: int, width: int) -> range:
        each = self.geometry.heads_per_rank(width)
        first = member * self.geometry.slots_per_page(width) // width * each
        return range(first, first + each)

    def rows(self, rank: Rank, width: int) -> Any:
        slots = self.geometry.slots_per_page(width)
        return self.kv[rank].reshape(LAYERS, PAGES * slots, -1)

    def content(self, block: int, heads: range) -> Any:
        head_bytes = self.geometry.layer_page_bytes // self.geometry.num_kv_heads
        rows = [
            np.repeat([100 + 20 * layer + 50 * (block % 3) + head for head in heads], head_bytes)
            for layer in range(LAYERS)
        ]
        return np.array(rows, dtype=np.uint8)


LAYOUTS = [
    (kind, heads, tuple(range(there)), here)
    for kind, heads, there, here in product(CopyKind, (4, 2, 1), (1, 2, 4), (1, 2, 4))
    # No mover copies where members have the same heads as others.
    if kind is CopyKind.ARRAYS or heads >= max(there, here)
]


@pytest.mark.parametrize(("kind", "heads", "there", "here"), LAYOUTS)
def test_each_layout_reads_each_other_one(
    kind: CopyKind, heads: int, there: tuple[int, ...], here: int
) -> None:
    cell = Cell(heads)
    lost = cell.of_group(there)
    for member in range(here):
        rank = Rank(member)
        own = {**cell.kv, rank: np.zeros_like(cell.kv[rank])}
        reader = LostKV((lost,), rank, copies_of(kind, cell.geometry, rank, own))
        slots = cell.geometry.slots_per_page(here)
        table = SlotTable(PAGES, slots) if here > 1 else None
        if table is not None:
            table.map(np.array([1]), np.array([3]))
            table.map(np.array([2]), np.array([4]))
        into = [slots, 2 * slots]
        step = BlockCopies(lost_blocks=into, lost_places=[3, 1])
        if rank in there:
            own[rank][:] = cell.kv[rank]
        reader.loader(step, Split(1, here), member, table)()
        found = own[rank].reshape(LAYERS, PAGES * slots, -1)
        at = into if table is None else table.slots(into)
        for slot, block in zip(at, (3, 1), strict=True):
            wanted = cell.content(block, cell.heads(member, here))
            assert (found[:, slot] == wanted).all(), (member, slot, block)


def reader_of(*directories: GroupDirectory, cell: Cell | None = None) -> LostKV:
    cell = cell or Cell(2)
    return LostKV(directories, Rank(3), ArrayPageCopies(cell.geometry, Rank(3), cell.kv))


def test_only_groups_that_lack_a_member_are_read() -> None:
    cell = Cell(2)
    lost, whole = cell.of_group((0, 1)), cell.of_group((2,))
    lost.fill([4], [key_of(4)])
    whole.fill([2], [key_of(2)])
    kv = reader_of(lost, whole, cell=cell)
    kv.know({Rank(0): 1, Rank(1): 1, Rank(2): 1})
    kv.refresh()
    assert kv.find(key_of(4)) is None
    kv.know({Rank(0): 1, Rank(1): 2, Rank(2): 1})
    kv.refresh()
    assert kv.find(key_of(4)) == 4
    assert kv.find(key_of(2)) is None
    kv.know({Rank(0): 1, Rank(1): 2})
    kv.refresh()
    assert kv.find(key_of(2)) == PLACES + 2


def test_what_is_given_up_meanwhile_is_void() -> None:
    cell = Cell(2)
    lost = cell.of_group((0, 1))
    lost.fill([2, 4], [key_of(2), key_of(4)])
    kv = reader_of(lost, cell=cell)
    kv.know({Rank(0): 1})
    source = LostBlocks(Tasks(), kv)
    source.refresh()
    places = [source.take(key_of(block)) for block in (2, 4)]
    assert None not in places
    step = BlockCopies()
    source.load(step, "task", [7, 8], [place for place in places if place is not None])
    assert kv.hit_tokens == 2 * Tasks.block_size
    assert source.gone(step) == set()
    lost.give_up(1, np.array([4]))
    assert source.gone(step) == {8}
    assert source.take(key_of(4)) is None, "it is not offered again"
    lost.give_up(0)
    assert source.gone(step) == {7, 8}


def test_nobody_reads_the_pages_of_a_rank_that_distrusts_itself() -> None:
    cell = Cell(2)
    lost, other = cell.of_group((0, 3)), cell.of_group((1,))
    lost.fill([4], [key_of(4)])
    other.fill([2], [key_of(2)])
    own = reader_of(lost, other, cell=cell)
    own.distrust()
    reader = reader_of(lost, other, cell=cell)
    reader.know({})
    reader.refresh()
    assert reader.find(key_of(4)) is None
    assert reader.find(key_of(2)) == PLACES + 2


def test_a_place_with_another_block_is_void() -> None:
    """A group that is only out of reach goes on: its blocks come to hold other content."""
    lost = Cell(2).of_group((0, 1))
    lost.fill([2, 4], [key_of(2), key_of(4)])
    kv = reader_of(lost)
    kv.know({Rank(0): 1})
    source = LostBlocks(Tasks(), kv)
    source.refresh()
    step, place = BlockCopies(), source.take(key_of(2))
    assert place is not None
    source.load(step, "task", [7], [place])
    for key in (9, 2):
        lost.clear(2)
        lost.fill([2], [key_of(key)])
        source.refresh()
        assert source.take(key_of(2)) is None, "it was read before"
        assert source.gone(step) == {7}, "it held something else meanwhile"
    assert source.take(key_of(4)) is not None
    kv.know({Rank(1): 1})
    source.refresh()
    assert source.take(key_of(2)) is not None


class Tasks:
    """What the source reads of a scheduler."""

    requests: dict[str, Any] = {}  # noqa: RUF012
    block_size = 2

    def _blocks_of(self, request_id: str, first: int = 0, last: int | None = None) -> list[int]:
        return []


def over(entries: BlockEntries, plan: object, *, is_void: bool = False) -> None:
    with entries.of_finished_step(plan, is_void=is_void):
        pass


def test_blocks_are_entered_when_their_step_is_over() -> None:
    lost = Cell(2).of_group((0,))
    entries = BlockEntries(lost)
    first, second = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    entries.add(2, key_of(2))
    entries.step_is_planned(first)
    entries.add(3, key_of(3))
    entries.add(4, key_of(4))
    entries.step_is_planned(second)
    assert lost.entries() == ([], [])
    over(entries, first)
    assert lost.entries() == ([2], [key_of(2)])
    entries.remove(2)
    entries.remove(3)
    over(entries, second)
    assert lost.entries() == ([4], [key_of(4)]), "2 and 3 get other content"


def test_a_step_that_computes_nothing_enters_nothing() -> None:
    """It lists ended tasks: members may still load what the leader has already."""
    lost = Cell(2).of_group((0, 1))
    entries = BlockEntries(lost)
    empty, later = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    entries.add(2, key_of(2))
    entries.step_is_planned(empty, computes=False)
    over(entries, empty)
    assert lost.entries() == ([], [])
    entries.step_is_planned(later)
    over(entries, later)
    assert lost.entries() == ([2], [key_of(2)])


@pytest.mark.parametrize("end", ["void", "lost"])
def test_a_step_that_does_not_count_enters_nothing(end: str) -> None:
    lost = Cell(2).of_group((0,))
    entries = BlockEntries(lost)
    step = SchedulerOutput.make_empty()
    entries.add(2, key_of(2))
    entries.step_is_planned(step)
    if end == "lost":
        entries.forget_steps()
    over(entries, step, is_void=end == "void")
    assert lost.entries() == ([], [])


def test_a_block_that_an_earlier_step_fills_does_not_wait_for_a_later_one() -> None:
    """As in vLLM's asynchronous scheduler, which gives it its hash late."""
    lost = Cell(2).of_group((0, 1))
    entries = BlockEntries(lost)
    first, second = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    entries.step_is_planned(first)
    entries.add(2, key_of(2), is_filled=True)
    entries.add(3, key_of(3))
    entries.step_is_planned(second)
    assert lost.entries() == ([], [])
    over(entries, first)
    assert lost.entries()[0] == [2]
    with entries.of_finished_step(None, is_void=False):
        entries.add(4, key_of(4))
        entries.add(5, key_of(5))
        entries.remove(5)
    assert lost.entries()[0] == [2, 4]
    with entries.of_finished_step(None, is_void=True):
        entries.add(6, key_of(6))
    assert lost.entries()[0] == [2, 4]
    over(entries, second)
    assert lost.entries()[0] == [2, 3, 4]
    entries.add(7, key_of(7), is_filled=True)
    entries.step_is_planned(SchedulerOutput.make_empty())
    assert lost.entries()[0] == [2, 3, 4, 7], "no step is under way that could fill it"


def test_a_task_that_ended_with_the_step_holds_no_block() -> None:
    lost = Cell(2).of_group((0, 1))
    entries = BlockEntries(lost, lambda block: block != 3)
    step = SchedulerOutput.make_empty()
    entries.add(2, key_of(2))
    entries.add(3, key_of(3))
    entries.step_is_planned(step)
    over(entries, step)
    assert lost.entries()[0] == [2, 3]
    slots = lost.shape.slots_per_page
    assert lost.held_pages(0).tolist() == [(lost.shape.blocks - 1 - 2) // slots]


def test_a_member_may_have_fewer_pages_than_the_directory_has_room_for() -> None:
    lost = Cell(2).of_group((0, 1))
    lost.keep(1, FORMATION, np.arange(lost.shape.blocks - 2, dtype=np.int32))
    assert lost.formation == FORMATION
    assert lost.slots(1, np.array([2, 4])).tolist() == [2, 4]

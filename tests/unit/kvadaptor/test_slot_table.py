"""Tables from logical blocks to slots, and to the engine's numbers of a pipeline stage."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvadaptor.geometry import PageGeometry, Slots, Split
from kvadaptor.slot_table import SlotTable

PAGES = 6
GEOMETRY = PageGeometry(
    num_layers=8, num_kv_heads=4, head_dim_k=2, head_dim_v=2, dtype_bytes=4, tokens_per_slot=5
)
PIPELINES = (Split(2, 1), Split(4, 1), Split(2, 2), Split(4, 2), Split(2, 4))


def array(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def table_of(split: Split, num_pages: int = PAGES) -> tuple[SlotTable, Slots]:
    slots = GEOMETRY.slots(split)
    return SlotTable(num_pages, slots.count, slots), slots


@pytest.mark.parametrize("split", PIPELINES, ids=str)
def test_a_pipeline_stage_finds_a_block_in_the_row_and_column_of_its_slot(split: Split) -> None:
    table, slots = table_of(split)
    pages = array(4, 1, 5)
    table.map(array(2, 3, 1), pages)
    first = slots.first_blocks(PAGES)
    for index, page in ((2, 4), (3, 1), (1, 5)):
        blocks = [index * slots.count + place for place in range(slots.count)]
        wanted = [first[place] + page * slots.columns for place in range(slots.count)]
        assert table.slots(blocks) == wanted
        assert max(wanted) < slots.num_blocks(PAGES)


@pytest.mark.parametrize("indices", [(1, 2, 3, 4), (1, 3, 2, 4), (1, 2, 4, 5), (5, 1, 4, 2)])
def test_lease_indices_may_have_gaps_and_come_in_any_order(indices: tuple[int, ...]) -> None:
    table = SlotTable(PAGES, 2)
    table.map(array(2, 3), array(5, 1))
    table.unmap(array(2, 3))
    pages = array(4, 1, 5, 2)
    table.map(array(*indices), pages)
    for index, page in zip(indices, pages.tolist(), strict=True):
        assert table.slots([2 * index, 2 * index + 1]) == [2 * page, 2 * page + 1]
    (other,) = {1, 2, 3, 4, 5} - set(indices)
    with pytest.raises(AssertionError, match="not leased"):
        table.slots([2 * other])


def test_numbers_of_a_known_split() -> None:
    """Two stages of 4 layers and both heads' halves: row 1 lies 4 regions of 6 pages further."""
    table, slots = table_of(Split(2, 2))
    assert (slots.rows, slots.columns, slots.layers) == (2, 2, 4)
    table.map(array(1), array(3))
    assert table.slots([4, 5, 6, 7]) == [6, 7, 4 * 6 * 2 + 6, 4 * 6 * 2 + 7]
    assert table.all_slots()[4:8].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("split", PIPELINES, ids=str)
def test_leases_and_moves_stay_in_numbers_of_slots(split: Split) -> None:
    """A migration assigns any slots, and reads where its rank has them: no number is the engine's.

    Slot s of page p is s + slots · p in every split.
    """
    (table, slots), plain = table_of(split), SlotTable(PAGES, GEOMETRY.slots(split).count)
    count, first = slots.count, slots.first_blocks(PAGES)
    blocks = array(*range(count, 2 * count))
    moved = array(*(3 * count + (place + 1) % count for place in range(count)))
    for each in (table, plain):
        each.map(array(2), array(5))
        each.assign(blocks, moved)
    assert table.all_slots().tolist() == plain.all_slots().tolist()
    assert plain.slots(blocks.tolist()) == moved.tolist()
    assert table.slots(blocks.tolist()) == [
        first[(place + 1) % count] + 3 * slots.columns for place in range(count)
    ]


@given(st.sampled_from(PIPELINES), st.integers(2, 9), st.data())
def test_no_two_blocks_of_a_group_are_one_block_of_its_engine(
    split: Split, num_pages: int, data: st.DataObject
) -> None:
    table, slots = table_of(split, num_pages)
    indices = array(*range(1, num_pages))
    table.map(indices, array(*data.draw(st.permutations(range(1, num_pages)))))
    numbers = table.slots(list(range(num_pages * slots.count)))
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) <= max(numbers) < slots.num_blocks(num_pages)


@pytest.mark.parametrize("split", [Split(1, 1), Split(1, 2), Split(1, 4)], ids=str)
def test_without_stages_the_engine_has_the_numbers_of_slots(split: Split) -> None:
    (table, slots), plain = table_of(split), SlotTable(PAGES, GEOMETRY.slots(split).count)
    for each in (table, plain):
        each.map(array(1, 3), array(5, 2))
    blocks = [slots.count, 2 * slots.count - 1, 3 * slots.count]
    assert table.slots(blocks) == plain.slots(blocks)
    assert table.slots(blocks) == table.all_slots()[blocks].tolist()


@pytest.mark.parametrize("split", [Split(1, 2), *PIPELINES], ids=str)
def test_a_block_that_is_not_leased_is_refused(split: Split) -> None:
    table, slots = table_of(split)
    table.map(array(2), array(4))
    assert len(table.slots([0, 2 * slots.count])) == 2, "the null page is always there"
    with pytest.raises(AssertionError, match="a block that is not leased"):
        table.slots([3 * slots.count])
    before = table.slots([2 * slots.count])
    table.unmap(array(2))
    with pytest.raises(AssertionError, match="a block that is not leased"):
        table.slots([2 * slots.count])
    table.map(array(2), array(4))
    assert table.slots([2 * slots.count]) == before

"""Who holds which part of the weights, and who can lend it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.weight_parts import WeightParts

HALVES = WeightParts(2, 4, borrows=True)


def group(first: int, width: int) -> Group:
    mode = Mode.DP if width == 1 else Mode.TP
    return Group(tuple(map(Rank, range(first, first + width))), mode)


def test_neighbours_hold_the_same_part_and_each_block_holds_all() -> None:
    assert [HALVES.part_of(Rank(rank)) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    quarters = WeightParts(4, 4)
    assert [quarters.part_of(Rank(rank)) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert HALVES.holders(1, Rank(5)) == (6, 7)
    assert [WeightParts().part_of(Rank(rank)) for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("readable", "lacks"), [((), 1), ((1,), 1), ((2,), None), ((3,), None), ((6, 7), 1)]
)
def test_one_lender_of_a_part_is_enough(readable: tuple[int, ...], lacks: int | None) -> None:
    assert HALVES.lacking(group(0, 1), [Rank(rank) for rank in readable]) == lacks
    assert HALVES.lacking(group(0, 2), [Rank(rank) for rank in readable]) == lacks
    assert HALVES.lacking(group(0, 4), []) is None


def test_ranks_that_do_not_borrow_lack_what_they_do_not_hold() -> None:
    assert WeightParts(2, 4).lacking(group(0, 1), [Rank(2), Rank(3)]) == 1
    assert WeightParts(2, 4).lacking(group(4, 4), []) is None
    assert WeightParts().lacking(group(3, 1), []) is None


@given(
    width=st.sampled_from((1, 2, 4, 8)),
    parts=st.sampled_from((1, 2, 4, 8)),
    rank=st.integers(0, 15),
    readable=st.sets(st.integers(0, 15).map(Rank)),
)
def test_a_rank_can_borrow_exactly_if_each_part_has_a_readable_holder(
    width: int, parts: int, rank: int, readable: set[Rank]
) -> None:
    held = WeightParts(min(parts, width), width, borrows=True)
    sources = {Rank(rank), *readable}.intersection(held.sharing_with(Rank(rank)))
    missing = set(range(held.count)) - {held.part_of(each) for each in sources}
    assert held.lacking(group(rank, 1), readable) == min(missing, default=None)

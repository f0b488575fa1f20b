"""Loans by example: who lends which part, who replaces a lost lender, what a step costs."""

import pytest

from comm_pool.loans import (
    Loan,
    LoanError,
    fewest_whole_layers,
    floor_s,
    holders_of,
    loan_plan,
    most_whole_layers,
    order_of,
    part_of,
    spread_whole,
)

MB = 1_000_000


def lenders(rank: int, ranks: int, parts: int, *lost: int) -> list[int]:
    """The lenders of one layer's loans."""
    plan = loan_plan(rank, ranks, parts, 1, holders={*range(ranks)} - {*lost})
    return [loan.lender for loan in plan]


def test_two_ranks_lend_each_other_their_part() -> None:
    assert loan_plan(0, 2, 2, 3) == (
        Loan(layer=0, part=1, lender=1, slot=0, after=None),
        Loan(layer=1, part=1, lender=1, slot=1, after=None),
        Loan(layer=2, part=1, lender=1, slot=0, after=0),
    )
    assert {(loan.part, loan.lender) for loan in loan_plan(1, 2, 2, 3)} == {(0, 0)}


def test_each_of_four_ranks_begins_with_the_part_that_follows_its_own() -> None:
    assert [order_of(rank, 4, 4) for rank in range(4)] == [
        (0, 1, 2, 3),
        (1, 2, 3, 0),
        (2, 3, 0, 1),
        (3, 0, 1, 2),
    ]
    assert loan_plan(2, 4, 4, 2) == (
        Loan(0, 3, 3, 0, None),
        Loan(0, 0, 0, 1, None),
        Loan(0, 1, 1, 2, None),
        Loan(1, 3, 3, 3, None),
        Loan(1, 0, 0, 0, 0),
        Loan(1, 1, 1, 1, 1),
    )


def test_of_four_ranks_with_halves_each_borrows_from_the_one_across() -> None:
    assert [part_of(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [*holders_of(1, 4, 2)] == [2, 3]
    assert [lenders(rank, 4, 2) for rank in range(4)] == [[2], [3], [0], [1]]


def test_the_other_rank_of_a_half_lends_in_place_of_a_lost_one() -> None:
    assert [lenders(rank, 4, 2, 2) for rank in (0, 1, 3)] == [[3], [3], [1]]


def test_readers_of_lost_ranks_are_shared_out() -> None:
    assert [lenders(rank, 8, 2, 4, 5) for rank in range(4)] == [[6], [7], [6], [7]]
    assert [lenders(rank, 8, 2, 4, 5, 7) for rank in range(4)] == [[6], [6], [6], [6]]
    assert [lenders(rank, 8, 2, 5, 6, 7) for rank in range(4)] == [[4], [4], [4], [4]]


def test_where_the_only_holder_of_a_part_is_lost_nobody_lacking_it_can_borrow() -> None:
    with pytest.raises(LoanError) as refused:
        loan_plan(0, 4, 4, 2, holders={0, 1, 3})
    assert str(refused.value) == (
        "rank 0 lacks part 2 (rank 2), and none of these ranks lives: start one for each part."
    )
    with pytest.raises(LoanError, match=r"rank 1 lacks part 2 \(rank 2\) and part 0 \(rank 0\), "):
        loan_plan(1, 4, 4, 2, holders={3})
    with pytest.raises(LoanError, match=r"part 1 \(rank 2 or rank 3\), and none"):
        loan_plan(0, 4, 2, 2, holders=())


def test_a_rank_reads_its_own_part_whatever_the_holders_are() -> None:
    assert loan_plan(0, 2, 2, 1, holders=[1]) == (Loan(0, 1, 1, 0, None),)
    assert loan_plan(0, 1, 1, 9, holders=()) == loan_plan(3, 4, 1, 9) == ()


def test_whole_layers_are_not_borrowed_but_do_not_make_up_for_a_lost_part() -> None:
    assert [loan.layer for loan in loan_plan(0, 2, 2, 5, whole={0, 3})] == [1, 2, 4]
    with pytest.raises(LoanError):
        loan_plan(0, 2, 2, 1, whole={0}, holders={0})


def test_a_ring_of_one_slot_takes_one_loan_at_a_time() -> None:
    plan = loan_plan(0, 4, 4, 2, slots=1)
    assert {loan.slot for loan in plan} == {0}
    assert [loan.after for loan in plan] == [None, 0, 1, 2, 3, 4]


def test_a_ring_with_room_for_the_whole_step_waits_for_nothing() -> None:
    assert [loan.after for loan in loan_plan(0, 2, 2, 3, slots=4)] == [None] * 3


def test_floor_of_a_step() -> None:
    assert floor_s(1_500, 3_000.0) == 0.5


def test_whole_layers_are_spread_evenly_from_the_first() -> None:
    assert spread_whole(8, 0) == frozenset()
    assert spread_whole(8, 1) == {0}
    assert spread_whole(8, 3) == {0, 2, 5}
    assert spread_whole(3, 3) == {0, 1, 2}


def test_fewest_whole_layers_keep_the_floor() -> None:
    """Of 64 layers of 2 x 393 MB, 374 GB/s copy 47 in 50 ms."""
    sizes = [393 * MB] * 64
    assert fewest_whole_layers(sizes, 2, 374e9, 0.05) == 17
    assert fewest_whole_layers(sizes, 2, 374e9, 1.0) == 0
    assert fewest_whole_layers(sizes, 2, 374e9, 0.0) == 64
    assert fewest_whole_layers(sizes, 2, 374e9, 0.025) == 41
    assert fewest_whole_layers(sizes, 2, 374e9, 0.1) == 0
    assert fewest_whole_layers(sizes, 2, 374e9, 0.001) == 64
    assert fewest_whole_layers([0] * 64, 2, 374e9, 0.001) == 0
    assert fewest_whole_layers(sizes, 1, 374e9, 0.0) == 0
    assert fewest_whole_layers([100] * 4, 4, 100.0, 6.0) == 2


def test_most_whole_layers_fit_the_memory() -> None:
    """A rank holds one part of each layer already."""
    sizes = [393 * MB] * 64
    assert most_whole_layers(sizes, 2, 16 * 1000 * MB) == 40
    assert most_whole_layers(sizes, 4, 16 * 1000 * MB) == 13
    assert most_whole_layers(sizes, 2, 393 * MB - 1) == 0
    assert most_whole_layers(sizes, 2, 393 * MB) == 1
    assert most_whole_layers(sizes, 2, 10**12) == 64
    assert most_whole_layers(sizes, 1, 0) == 64
    # The second layer is large, and with two whole layers it is one of them.
    assert most_whole_layers([1, 9, 1], 2, 2) == 1
    assert most_whole_layers([], 2, 0) == 0


@pytest.mark.parametrize(
    ("rank", "ranks", "parts"), [(0, 3, 2), (0, 6, 3), (0, 4, 0), (4, 4, 2), (-1, 4, 2)]
)
def test_numbers_that_do_not_fit_break_an_assertion(rank: int, ranks: int, parts: int) -> None:
    with pytest.raises(AssertionError):
        loan_plan(rank, ranks, parts, 1)


def test_other_wrong_numbers_break_an_assertion() -> None:
    with pytest.raises(AssertionError):
        loan_plan(0, 2, 2, 1, slots=0)
    with pytest.raises(AssertionError):
        loan_plan(0, 2, 2, 1, whole={1})
    with pytest.raises(AssertionError):
        spread_whole(2, 3)
    with pytest.raises(AssertionError):
        floor_s(1, 0.0)
    with pytest.raises(AssertionError):
        fewest_whole_layers([1], 2, 1.0, -1.0)

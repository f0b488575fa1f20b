"""Pages asked for by number, as a move does: what is taken, what is refused, what is told."""

from collections.abc import Callable

import numpy as np
import pytest

from kvadaptor.pages import PageCounts, PageError, PagePool, Pages, distinct, without
from tests.harness.kv.page_leases import lease, lease_table

PAIR, QUAD = (0, 1), (0, 1, 2, 3)


def pages(*numbers: int) -> Pages:
    return np.array(numbers, dtype=np.int64)


def busy_pool() -> PagePool:
    """Twelve pages: 4, 9 owned; 7, 3 leased to PAIR as 2, 5; the rest free."""
    pool = PagePool(12)
    pool.own_these(pages(9, 4))
    pool.lease_these(PAIR, pages(2, 5), pages(7, 3))
    return pool


def test_pages_go_where_they_are_asked_for() -> None:
    pool = busy_pool()
    assert pool.own_pages().tolist() == [4, 9]
    assert lease_table(pool, PAIR) == {2: 7, 5: 3}
    assert pool.free_pages().tolist() == [1, 2, 5, 6, 8, 10, 11]
    assert pool.counts() == PageCounts(12, 1, 7, 2, {PAIR: 2})
    pool.integrity(full=True)


def test_lease_of_gives_indices_with_their_pages() -> None:
    indices, leased = busy_pool().lease_of(PAIR)
    assert (indices.tolist(), leased.tolist()) == ([2, 5], [7, 3])
    indices, leased = busy_pool().lease_of(QUAD)
    assert indices.size == leased.size == 0


def test_groups_are_those_with_a_lease() -> None:
    pool = busy_pool()
    assert pool.groups() == (PAIR,)
    pool.lease_these(QUAD, pages(1), pages(1))
    assert set(pool.groups()) == {PAIR, QUAD}
    pool.keep_only(PAIR, ())
    assert pool.groups() == (QUAD,)


def test_the_lowest_indices_are_leased_around_those_of_a_move() -> None:
    pool = busy_pool()
    assert lease(pool, PAIR, 4) == ((1, 1), (3, 2), (4, 5), (6, 6))
    pool.integrity(full=True)


def test_a_lease_grows_by_more_named_pages() -> None:
    pool = busy_pool()
    pool.lease_these(PAIR, pages(9, 1), pages(11, 10))
    assert lease_table(pool, PAIR) == {1: 10, 2: 7, 5: 3, 9: 11}


def test_what_a_move_gave_comes_back() -> None:
    pool = busy_pool()
    pool.keep_only(PAIR, [5])
    pool.keep_own(pages(9))
    assert pool.free_pages().tolist() == [1, 2, 4, 5, 6, 7, 8, 10, 11]
    pool.lease_these(PAIR, pages(2), pages(4))
    assert lease_table(pool, PAIR) == {2: 4, 5: 3}
    pool.integrity(full=True)


def test_nothing_asked_for_leaves_no_trace() -> None:
    pool = PagePool(4)
    pool.own_these(pages())
    pool.lease_these(PAIR, pages(), pages())
    assert pool.counts() == PageCounts(4, 1, 3, 0, {})
    assert pool.groups() == ()


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda pool: pool.own_these(pages(1, 4)), "by number is not free"),
        (lambda pool: pool.own_these(pages(1, 7)), "by number is not free"),
        (lambda pool: pool.own_these(pages(1, 0)), "by number is not free"),
        (lambda pool: pool.own_these(pages(1, 12)), "by number is not free"),
        (lambda pool: pool.own_these(pages(1, -1)), "by number is not free"),
        (lambda pool: pool.own_these(pages(1, 1)), "twice"),
        (lambda pool: pool.lease_these(PAIR, pages(1, 3), pages(1, 9)), "not free"),
        (lambda pool: pool.lease_these(PAIR, pages(1, 3), pages(1, 1)), "twice"),
        (lambda pool: pool.lease_these(PAIR, pages(1, 5), pages(1, 2)), "0 or in use"),
        (lambda pool: pool.lease_these(PAIR, pages(0), pages(1)), "0 or in use"),
        (lambda pool: pool.lease_these(PAIR, pages(-1), pages(1)), "0 or in use"),
        (lambda pool: pool.lease_these(PAIR, pages(1, 1), pages(1, 2)), "different indices"),
        (lambda pool: pool.lease_these(PAIR, pages(1), pages(1, 2)), "different indices"),
        (lambda pool: pool.lease_these((), pages(1), pages(1)), "needs a group"),
        (lambda pool: pool.lease_these(QUAD, pages(40), pages(4)), "not free"),
    ],
)
def test_a_refused_operation_changes_nothing(
    operation: Callable[[PagePool], object], reason: str
) -> None:
    pool, untouched = busy_pool(), busy_pool()
    with pytest.raises(PageError, match=reason):
        operation(pool)
    pool.integrity(full=True)
    assert pool.counts() == untouched.counts()
    assert pool.groups() == untouched.groups()
    assert pool.free_pages().tolist() == untouched.free_pages().tolist()
    assert lease_table(pool, PAIR) == lease_table(untouched, PAIR)


def test_an_index_between_those_in_use_cannot_be_kept() -> None:
    pool = busy_pool()
    with pytest.raises(PageError, match=r"lease index 3 of group \(0, 1\) is not in use"):
        pool.keep_only(PAIR, [2, 3, 5])
    assert lease_table(pool, PAIR) == {2: 7, 5: 3}


def test_an_index_that_is_given_up_twice_is_refused() -> None:
    pool = busy_pool()
    with pytest.raises(PageError, match="a lease index is given up twice"):
        pool.free_leased(PAIR, pages(5, 2, 5))
    with pytest.raises(PageError, match=r"lease index 3 of group .* is not in use"):
        pool.free_leased(PAIR, pages(2, 3))
    assert lease_table(pool, PAIR) == {2: 7, 5: 3}
    pool.free_leased(PAIR, pages(5, 2))
    assert lease_table(pool, PAIR) == {}
    pool.integrity(full=True)


def test_different_numbers_come_once_and_in_order() -> None:
    assert distinct(pages(7, 1, 7, 0), 9).tolist() == [0, 1, 7]
    assert distinct(pages(), 9).tolist() == []


def test_pages_without_others() -> None:
    assert without(pages(1, 4, 7), pages(4, 9)).tolist() == [1, 7]
    assert without(pages(1, 4, 7), pages()).tolist() == [1, 4, 7]
    assert without(pages(), pages(4)).tolist() == []

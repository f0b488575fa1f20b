"""Page accounting of one rank: where pages go, what is refused, and that integrity() bites."""

from collections.abc import Callable

import numpy as np
import pytest

from kvadaptor.pages import PageCounts, PageError, PagePool
from tests.harness.kv.page_leases import lease, lease_table

PAIR, QUAD = (0, 1), (0, 1, 2, 3)
NOTHING = np.zeros(0, dtype=np.int64)


def busy_pool() -> PagePool:
    """Ten pages: 1, 2 owned; 3, 4, 5 leased to PAIR as 1, 2, 3; 6 leased to QUAD; 7-9 free."""
    pool = PagePool(10)
    assert pool.grant_own_pages(2).tolist() == [1, 2]
    assert lease(pool, PAIR, 3) == ((1, 3), (2, 4), (3, 5))
    assert lease(pool, QUAD, 1) == ((1, 6),)
    return pool


def test_a_pool_shows_where_its_pages_are() -> None:
    assert repr(PagePool(4)) == "<3 of 4 pages free>"
    pool = busy_pool()
    shown = "owned 1-2, leased to 0-1 as 1-3, leased to 0-1-2-3 as 1"
    assert repr(pool) == f"<3 of 10 pages free, {shown}>"
    pool.keep_only(PAIR, [1, 3])
    pool.keep_own(np.array([2]))
    shown = "owned 2, leased to 0-1 as 1+3, leased to 0-1-2-3 as 1"
    assert repr(pool) == f"<5 of 10 pages free, {shown}>"


def test_a_new_pool_is_free_but_for_the_null_page() -> None:
    assert PagePool(10).counts() == PageCounts(10, 1, 9, 0, {})
    assert PagePool(1).counts() == PageCounts(1, 1, 0, 0, {})
    with pytest.raises(PageError, match="at least the reserved page"):
        PagePool(0)


def test_counts_say_where_pages_are() -> None:
    counts = busy_pool().counts()
    assert counts == PageCounts(10, 1, 3, 2, {PAIR: 3, QUAD: 1})
    assert list(counts.leased) == [PAIR, QUAD]


def test_returned_pages_are_granted_again_lowest_first() -> None:
    pool = PagePool(10)
    pool.grant_own_pages(6)
    pool.keep_own(np.array([1, 3, 4, 6]))
    assert pool.grant_own_pages(3).tolist() == [2, 5, 7]
    pool.integrity(full=True)


def test_all_pages_can_be_handed_out_and_no_more() -> None:
    pool = PagePool(10)
    assert pool.grant_own_pages(9).tolist() == [*range(1, 10)]
    assert pool.grant_own_pages(0).tolist() == []
    with pytest.raises(PageError, match="1 pages are asked for, but only 0 are free"):
        lease(pool, PAIR, 1)
    pool.keep_own(NOTHING)
    assert pool.counts().free == 9


def test_members_with_other_pages_agree_on_lease_indices() -> None:
    one, other = PagePool(20), PagePool(20)
    other.grant_own_pages(4)
    for pool in (one, other):
        lease(pool, PAIR, 5)
        pool.keep_only(PAIR, [2, 5])
        lease(pool, PAIR, 4)
    assert set(lease_table(one, PAIR)) == set(lease_table(other, PAIR)) == {1, 2, 3, 4, 5, 6}
    assert lease_table(one, PAIR) != lease_table(other, PAIR)


def test_leases_refill_the_lowest_indices_and_keep_the_kept_pages() -> None:
    pool = busy_pool()
    pool.keep_only(PAIR, [2])
    assert lease_table(pool, PAIR) == {2: 4}
    assert lease(pool, PAIR, 3) == ((1, 3), (3, 5), (4, 7))
    assert lease_table(pool, PAIR) == {2: 4, 1: 3, 3: 5, 4: 7}
    pool.integrity(full=True)


def test_keep_only_is_idempotent_and_can_end_a_lease() -> None:
    pool = busy_pool()
    pool.keep_only(PAIR, {0, 1})
    pool.keep_only(PAIR, {0, 1})
    assert pool.counts() == PageCounts(10, 1, 5, 2, {PAIR: 1, QUAD: 1})
    pool.keep_only(PAIR, ())
    pool.keep_only(PAIR, ())
    assert pool.counts() == PageCounts(10, 1, 6, 2, {QUAD: 1})
    assert lease(pool, PAIR, 1) == ((1, 3),)


def test_an_empty_lease_leaves_no_trace() -> None:
    pool = PagePool(4)
    assert lease(pool, PAIR, 0) == ()
    assert pool.counts().leased == {}
    assert lease_table(pool, PAIR) == {}


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda pool: pool.grant_own_pages(4), "4 pages are asked for, but only 3 are free"),
        (lambda pool: pool.grant_own_pages(-1), "must not be negative"),
        (lambda pool: lease(pool, PAIR, 4), "only 3 are free"),
        (lambda pool: lease(pool, (2, 3), 4), "only 3 are free"),
        (lambda pool: lease(pool, PAIR, -1), "must not be negative"),
        (lambda pool: lease(pool, (), 1), "at least one rank"),
        (lambda pool: pool.keep_own(np.array([1, 7])), "page 7 is to stay, but is not owned"),
        (lambda pool: pool.keep_own(np.array([1, 3])), "page 3 is to stay"),
        (lambda pool: pool.keep_own(np.array([1, 0])), "page 0 is to stay"),
        (lambda pool: pool.keep_own(np.array([1, 10])), "page 10 is to stay"),
        (lambda pool: pool.keep_own(np.array([1, -8])), "page -8 is to stay"),
        (lambda pool: pool.keep_only(PAIR, [1, 4]), "lease index 4 of group .0, 1. is not in use"),
        (lambda pool: pool.keep_only(PAIR, [-1]), "lease index -1"),
        (lambda pool: pool.keep_only((2, 3), [1]), "lease index 1 of group .2, 3."),
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
    for group in (PAIR, QUAD, (2, 3)):
        assert lease_table(pool, group) == lease_table(untouched, group)
    assert lease(pool, (2, 3), 3) == lease(untouched, (2, 3), 3)
    pool.keep_own(NOTHING)


def _break_counter(pool: PagePool) -> None:
    pool._free -= 1


def _leak_a_leased_page(pool: PagePool) -> None:
    pool._leases[PAIR][2] = 0


def test_cheap_integrity_sees_lost_pages() -> None:
    pool = busy_pool()
    _break_counter(pool)
    with pytest.raises(AssertionError, match="leased pages are not 10"):
        pool.integrity()


def _lease_one_page_twice(pool: PagePool) -> None:
    pool._leases[PAIR][2] = 3


def _lease_an_owned_page(pool: PagePool) -> None:
    pool._leases[PAIR][2] = 1


def _hand_out_the_null_page(pool: PagePool) -> None:
    pool._place[0] = pool._place[1]


def _swap_free_for_owned(pool: PagePool) -> None:
    pool._place[7] = pool._place[1]


def _lease_under_index_zero(pool: PagePool) -> None:
    table = pool._leases[PAIR]
    table[0], table[2] = table[2], 0


def _keep_an_empty_lease(pool: PagePool) -> None:
    pool._leases[2, 3] = pool._leases[PAIR] * 0
    pool._sizes[2, 3] = 0


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_lease_one_page_twice, "leased twice"),
        (_lease_an_owned_page, "elsewhere too"),
        (_hand_out_the_null_page, "page 0 is not reserved"),
        (_swap_free_for_owned, "count of free pages"),
        (_lease_under_index_zero, "index 0 is in use"),
        (_leak_a_leased_page, "size of a lease"),
        (_keep_an_empty_lease, "empty lease"),
    ],
)
def test_full_integrity_sees_misplaced_pages(
    damage: Callable[[PagePool], None], sentence: str
) -> None:
    pool = busy_pool()
    pool.integrity(full=True)
    damage(pool)
    pool.integrity()
    with pytest.raises(AssertionError, match=sentence):
        pool.integrity(full=True)


def test_a_large_pool_is_handed_out_in_one_piece_and_returned() -> None:
    pool = PagePool(100_000)
    pages = pool.grant_own_pages(60_000)
    _, leased = pool.lease_pages(PAIR, 39_999)
    assert (pages[-1], leased[-1], leased.size) == (60_000, 99_999, 39_999)
    pool.keep_only(PAIR, range(39_990, 40_000))
    pool.keep_own(NOTHING)
    assert pool.counts() == PageCounts(100_000, 1, 99_989, 0, {PAIR: 10})
    pool.integrity(full=True)

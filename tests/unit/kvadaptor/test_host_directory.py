"""The directory of host pages, rule by rule."""

import pytest

from kvadaptor.host.directory import WRITE_LIMIT_S, HostDirectory
from kvadaptor.host.layout import (
    JOURNAL_WORDS,
    SHARES_MAX,
    HostLayout,
    HostMemoryError,
    layout_of,
)
from tests.harness.kv.host_directories import opened, reopened, store

PAGES = 3
KEY = bytes(range(32))
OTHER = bytes(32)


@pytest.fixture
def two() -> list[HostDirectory]:
    return opened(HostLayout(2, PAGES, 64), 2)


def test_a_page_is_found_once_all_its_shares_are_written(two: list[HostDirectory]) -> None:
    own, other = two
    (page,) = own.allocate([KEY], 2, 0.0)
    assert page is not None
    assert own.has(KEY)
    own.entries.complete([page], 0, own.entries.tags([page]))
    other.refresh()
    assert own.find(KEY) is other.find(KEY) is None
    assert own.has(KEY)
    assert not other.has(KEY)
    assert not other.pin(page, KEY)
    other.entries.complete([page], 1, own.entries.tags([page]))
    assert own.find(KEY) == other.find(KEY) == page
    assert own.has(KEY)
    assert other.has(KEY)
    assert own.used_pages == 1


def test_a_pin_looks_at_the_block_again(two: list[HostDirectory]) -> None:
    own, other = two
    page = store(own, KEY)
    other.refresh()
    assert other.find(KEY) == page
    for number in range(PAGES):
        store(own, bytes([number + 1]) * 32)
    # The page has another block, of which the reader has not heard.
    assert other.find(KEY) == page
    assert not other.pin(page, KEY)
    other.refresh()
    assert other.find(KEY) is None


def test_a_pinned_page_stays_until_it_is_unpinned_by_all(two: list[HostDirectory]) -> None:
    own, other = two
    pages = [store(own, bytes([number]) * 32) for number in range(1, PAGES + 1)]
    other.refresh()
    for number, page in enumerate(pages, 1):
        assert own.pin(page, bytes([number]) * 32)
        assert other.pin(page, bytes([number]) * 32)
    assert own.allocate([KEY], 1, 0.0) == []
    own.unpin(pages)
    assert own.allocate([KEY], 1, 0.0) == []
    assert [own.find(bytes([number]) * 32) for number in (1, 2, 3)] == pages
    other.unpin(pages[1:2])
    assert own.allocate([KEY], 1, 0.0) == [pages[1]]


def test_blocks_get_pages_as_far_as_nobody_has_pinned_them(two: list[HostDirectory]) -> None:
    own, other = two
    pages = [store(own, bytes([number]) * 32) for number in range(1, PAGES + 1)]
    other.refresh()
    assert other.pin(pages[1], bytes([2]) * 32)
    keys = [bytes([number]) * 32 for number in range(10, 10 + PAGES)]
    found = own.allocate(keys, 1, 0.0)
    assert found == [pages[0], *pages[2:]]
    own.entries.complete(found, 0, own.entries.tags(found))
    assert [own.find(key) for key in keys] == [*found, None]
    assert own.find(bytes([2]) * 32) == pages[1]


@pytest.mark.parametrize("batch", [1, 300, 1_000])
def test_a_reader_that_lags_misses_nothing(batch: int) -> None:
    """It reads while the writer has written changes that it has not counted yet."""
    own, other = opened(HostLayout(2, 2 * JOURNAL_WORDS, 64), 2)
    keys = [number.to_bytes(32, "little") for number in range(1, JOURNAL_WORDS)]
    pages = own.allocate(keys, 1, 0.0)
    own.entries.complete(pages, 0, own.entries.tags(pages))
    count = own.layout.count_word(0)
    before = own._words[count]
    own.allocate([number.to_bytes(32, "big") for number in range(1, batch + 1)], 1, 0.0)
    after, own._words[count] = own._words[count], before
    other.refresh()
    own._words[count] = after
    other.refresh()
    assert None not in map(other.find, keys)


def test_a_read_makes_a_page_the_last_to_go(two: list[HostDirectory]) -> None:
    own = two[0]
    pages = [store(own, bytes([number]) * 32) for number in range(1, PAGES + 1)]
    own.settle()
    assert own.pin(pages[0], bytes([1]) * 32)
    own.unpin(pages[:1])
    assert [store(own, bytes([number]) * 32) for number in (7, 8, 9)] == [
        pages[1],
        pages[2],
        pages[0],
    ]


def test_pages_of_running_tasks_go_last_and_in_order(two: list[HostDirectory]) -> None:
    own = two[0]
    pages = [store(own, bytes([number]) * 32) for number in range(1, PAGES + 1)]
    own.settle()
    for page in (*pages, pages[0]):
        own.add_user(page)
    own.remove_users(pages[:2])
    # The first has one user left.
    assert store(own, KEY) == pages[1]
    own.settle()
    own.add_user(pages[1])
    own.remove_users(pages[:1])
    assert store(own, bytes([9]) * 32) == pages[0]
    own.settle()
    # Where all have users, the oldest goes, and is nobody's afterwards.
    own.add_user(pages[0])
    assert store(own, bytes([10]) * 32) == pages[2]
    own.settle()
    assert store(own, bytes([11]) * 32) == pages[2]
    own.add_user(PAGES + 1)  # Of another rank, which decides itself.
    own.remove_users([PAGES + 1])


def test_a_late_write_completes_nothing(two: list[HostDirectory]) -> None:
    """A member that was stopped writes the tag of the block that it was asked for."""
    own, other = two
    (page,) = own.allocate([KEY], 1, 0.0)
    assert page is not None
    (late,) = own.entries.tags([page])
    for number in range(1, PAGES):
        assert own.allocate([bytes([number]) * 32], 1, 0.0)
    assert own.allocate([OTHER], 1, WRITE_LIMIT_S) == []
    assert own.allocate([OTHER], 1, WRITE_LIMIT_S + 1)
    again = next(p for p in own.layout.pages_of(0) if own.entries.hash_of(p) == OTHER)
    other.entries.complete([again], 0, [late])
    assert own.find(OTHER) is None
    other.entries.complete([again], 0, own.entries.tags([again]))
    assert own.find(OTHER) == again


def test_what_was_never_completed_goes_first(two: list[HostDirectory]) -> None:
    own = two[0]
    (incomplete,) = own.allocate([OTHER], 1, 0.0)
    pages = [store(own, bytes([number]) * 32) for number in range(1, PAGES)]
    own.settle()
    late_s = WRITE_LIMIT_S + 1
    assert store(own, KEY, now_s=late_s) == incomplete
    assert store(own, bytes([9]) * 32, now_s=late_s) == pages[0]


def test_a_free_page_that_somebody_reads_is_taken_later(two: list[HostDirectory]) -> None:
    """A rank that ended in the middle of a change comes back while others look at the page."""
    own, other = two
    own._words[own.layout.entry_word(0)] += 1
    at = own.layout.pins_at(other.rank)
    own._bytes[at] = 1
    anew = reopened(own)
    assert {store(anew, bytes([number]) * 32) for number in (1, 2)} == {1, 2}
    own._bytes[at] = 0
    assert store(anew, bytes([3]) * 32) == 0


def test_tags_that_come_again_complete_nothing() -> None:
    (own,) = opened(HostLayout(1, 1, 64))
    (page,) = own.allocate([KEY], 2, 0.0)
    assert page is not None
    (first,) = own.entries.tags([page])
    own.entries.complete([page], 1, [first])
    for _ in range(255):
        # One share alone: the byte of the other one stays.
        now_s = own._pending.get(page, 0.0) + WRITE_LIMIT_S + 1
        assert own.allocate([KEY], 1, now_s) == [page]
    now_s += WRITE_LIMIT_S + 1
    assert own.allocate([KEY], 2, now_s) == [page]
    tags = set()
    while own.entries.tags([page]) != [first]:
        now_s += WRITE_LIMIT_S + 1
        assert own.allocate([KEY], 2, now_s) == [page]
        tags.update(own.entries.tags([page]))
    assert 0 not in tags
    own.entries.complete([page], 0, [first])
    assert own.find(KEY) is None


def test_a_restarted_rank_takes_over_what_is_complete(two: list[HostDirectory]) -> None:
    own, other = two
    page = store(own, KEY, shares=2)
    (incomplete,) = own.allocate([OTHER], 1, 0.0)
    assert incomplete is not None
    anew = reopened(own, 5.0)
    assert anew.find(KEY) == page
    assert anew.find(OTHER) is None
    assert anew.has(OTHER)
    assert anew.used_pages == 2
    anew.entries.complete([incomplete], 0, anew.entries.tags([incomplete]))
    assert anew.find(OTHER) == incomplete
    other.refresh()
    assert other.find(KEY) == page
    # Its pins ended with it.
    assert own.pin(page, KEY)
    assert reopened(own).allocate([bytes([1]) * 32], 1, 0.0)
    last = reopened(own)
    for number in range(2, 5):
        store(last, bytes([number]) * 32, now_s=WRITE_LIMIT_S + 9)
    assert last.find(KEY) is None


def test_an_entry_that_was_being_changed_is_free(two: list[HostDirectory]) -> None:
    own, other = two
    page = store(own, KEY)
    other.refresh()
    word = own.layout.entry_word(page)
    own._words[word] += 1
    assert other.find(KEY) is None
    assert not other.pin(page, KEY)
    anew = reopened(own)
    other.refresh()
    assert anew.find(KEY) is other.find(KEY) is None
    assert anew.used_pages == 0
    assert {store(anew, bytes([number]) * 32) for number in (1, 2, 3)} == {0, 1, 2}


def test_a_reader_that_missed_much_reads_all(two: list[HostDirectory]) -> None:
    own, other = two
    for number in range(JOURNAL_WORDS + 10):
        store(own, number.to_bytes(4, "little") * 8)
    other.refresh()
    found = [other.find(n.to_bytes(4, "little") * 8) for n in range(JOURNAL_WORDS + 10)]
    assert [page is not None for page in found[-PAGES:]] == [True] * PAGES
    assert not any(page is not None for page in found[:-PAGES])


def test_several_pages_of_a_block_are_all_found() -> None:
    own, second, reader = opened(HostLayout(3, PAGES, 64), 3)
    first_page, second_page = store(own, KEY), store(second, KEY)
    reader.refresh()
    assert reader.find(KEY) in (first_page, second_page)
    for number in range(1, PAGES + 1):
        store(own, bytes([number]) * 32)
    assert reader.find(KEY) == first_page, "not refreshed yet"
    reader.refresh()
    assert reader.find(KEY) == second_page
    third = store(own, KEY)
    for number in range(1, PAGES + 1):
        store(second, bytes([number + 10]) * 32)
    reader.refresh()
    assert reader.find(KEY) == third


def test_short_hashes_are_found_and_long_ones_refused(two: list[HostDirectory]) -> None:
    own = two[0]
    page = store(own, b"short")
    assert own.find(b"short") == page
    assert own.pin(page, b"short")
    with pytest.raises(HostMemoryError, match="sha256"):
        own.find(bytes(33))
    with pytest.raises(HostMemoryError, match=str(SHARES_MAX)):
        own.allocate([KEY], SHARES_MAX + 1, 0.0)
    with pytest.raises(HostMemoryError):
        own.allocate([KEY], 0, 0.0)
    page = store(own, KEY, shares=SHARES_MAX)
    assert own.find(KEY) == page


def test_a_page_takes_a_limited_number_of_pins(two: list[HostDirectory]) -> None:
    own = two[0]
    page = store(own, KEY)
    assert all(own.pin(page, KEY) for _ in range(255))
    assert not own.pin(page, KEY)
    own.unpin([page] * 255)
    assert own.pin(page, KEY)


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(HostMemoryError, match="--host-kv") as refusal:
        layout_of(1 << 16, 4, 1 << 20)
    need = int(str(refusal.value).split("at least ")[1].split()[0])
    assert layout_of(need, 4, 1 << 20).pages_per_rank == 1
    with pytest.raises(HostMemoryError):
        layout_of(need - 1, 4, 1 << 20)


@pytest.mark.parametrize("pages", [3, 40, 63, 102])
def test_a_block_that_is_used_again_and_again_stays(pages: int) -> None:
    """Also where complete pages are not counted as such one by one, and parts are small."""
    (own,) = opened(HostLayout(1, pages, 64))
    page = store(own, KEY)
    for number in range(1, 1_000):
        store(own, number.to_bytes(32, "big"))
        if not number % max(1, pages // 2):
            assert own.find(KEY) == page
            assert own.pin(page, KEY)
            own.unpin([page])

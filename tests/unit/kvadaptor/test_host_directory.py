"""The directory of host pages, rule by rule."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvadaptor.fence import FENCE
from kvadaptor.host import directory
from kvadaptor.host.directory import WRITE_LIMIT_S, HostDirectory
from kvadaptor.host.layout import (
    JOURNAL_WORDS,
    SHARES_MAX,
    HostLayout,
    HostMemoryError,
    layout_of,
)

PAGES = 3
KEY = bytes(range(32))
OTHER = bytes(32)


def opened(layout: HostLayout, count: int = 1) -> list[HostDirectory]:
    memory = memoryview(bytearray(layout.data_at))
    return [HostDirectory(memory, layout, rank, 0.0) for rank in range(count)]


@pytest.fixture
def two() -> list[HostDirectory]:
    return opened(HostLayout(2, PAGES, 64), 2)


def store(own: HostDirectory, key: bytes, *, shares: int = 1, now_s: float = 0.0) -> int:
    (page,) = pages = own.allocate([key], shares, now_s)
    for share in range(shares):
        own.complete(pages, share, own.tags(pages))
    return page


def reopened(own: HostDirectory, now_s: float = 0.0) -> HostDirectory:
    return HostDirectory(own._bytes, own.layout, own.rank, now_s)


def test_a_page_is_found_once_all_its_shares_are_written(two: list[HostDirectory]) -> None:
    own, other = two
    (page,) = own.allocate([KEY], 2, 0.0)
    assert page is not None
    assert own.has(KEY)
    own.complete([page], 0, own.tags([page]))
    other.refresh()
    assert own.find(KEY) is other.find(KEY) is None
    assert own.has(KEY)
    assert not other.has(KEY)
    assert not other.pin(page, KEY)
    other.complete([page], 1, own.tags([page]))
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
    own.complete(found, 0, own.tags(found))
    assert [own.find(key) for key in keys] == [*found, None]
    assert own.find(bytes([2]) * 32) == pages[1]


@pytest.mark.parametrize("batch", [1, 300, 1_000])
def test_a_reader_that_lags_misses_nothing(batch: int) -> None:
    """It reads while the writer has written changes that it has not counted yet."""
    own, other = opened(HostLayout(2, 2 * JOURNAL_WORDS, 64), 2)
    keys = [number.to_bytes(32, "little") for number in range(1, JOURNAL_WORDS)]
    pages = own.allocate(keys, 1, 0.0)
    own.complete(pages, 0, own.tags(pages))
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
    (late,) = own.tags([page])
    for number in range(1, PAGES):
        assert own.allocate([bytes([number]) * 32], 1, 0.0)
    assert own.allocate([OTHER], 1, WRITE_LIMIT_S) == []
    assert own.allocate([OTHER], 1, WRITE_LIMIT_S + 1)
    again = next(p for p in own.layout.pages_of(0) if own._hash_of(p) == OTHER)
    other.complete([again], 0, [late])
    assert own.find(OTHER) is None
    other.complete([again], 0, own.tags([again]))
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
    (first,) = own.tags([page])
    own.complete([page], 1, [first])
    for _ in range(255):
        # One share alone: the byte of the other one stays.
        now_s = own._pending.get(page, 0.0) + WRITE_LIMIT_S + 1
        assert own.allocate([KEY], 1, now_s) == [page]
    now_s += WRITE_LIMIT_S + 1
    assert own.allocate([KEY], 2, now_s) == [page]
    tags = set()
    while own.tags([page]) != [first]:
        now_s += WRITE_LIMIT_S + 1
        assert own.allocate([KEY], 2, now_s) == [page]
        tags.update(own.tags([page]))
    assert 0 not in tags
    own.complete([page], 0, [first])
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
    anew.complete([incomplete], 0, anew.tags([incomplete]))
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


SIXTEEN = HostLayout(2, 16, 64)


def test_free_pages_go_to_a_rank_that_has_few() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(15):
        store(own, bytes([number]) * 32, now_s=1.0)
    for each in (own, other, own):
        each.give(2.0)
    # It wants two free pages, and had one.
    assert (own.own_pages, other.own_pages) == (17, 15)
    assert {store(own, bytes([number]) * 32, now_s=2.0) for number in (20, 21)} == {15, 16}
    other.refresh()
    assert other.find(bytes([21]) * 32) == 16


def test_a_rank_gives_what_was_used_before_all_of_the_other() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(16):
        store(other, bytes([number]) * 32, now_s=1.0 if number < 3 else 4.5)
    other.settle()
    for number in range(16):
        store(own, bytes([16 + number]) * 32, now_s=7.0)
    own.settle()
    for _ in range(9):
        own.give(7.0)
        other.give(7.0)
    # Three are older by more than the margin; two of them are wanted at first.
    assert own.own_pages == 18
    for number in range(2):
        store(own, bytes([40 + number]) * 32, now_s=7.0)
    for _ in range(9):
        own.give(7.0)
        other.give(7.0)
    assert own.own_pages == 19
    assert [other.find(bytes([number]) * 32) is None for number in range(5)] == [True] * 3 + [
        False
    ] * 2


def test_a_page_that_somebody_reads_is_not_given() -> None:
    own, other = opened(SIXTEEN, 2)
    pages = [store(other, bytes([number]) * 32, now_s=1.0) for number in range(16)]
    own.give(1.0)
    assert own.pin(pages[0], bytes([0]) * 32)
    for number in range(16):
        store(own, bytes([16 + number]) * 32, now_s=20.0)
    own.give(20.0)
    other.give(20.0)
    own.give(20.0)
    assert own.find(bytes([0]) * 32) == pages[0]
    assert [own.find(bytes([number]) * 32) for number in (1, 2, 3)] == [None, None, pages[3]]
    assert own.own_pages == 18


def test_a_rank_that_has_ended_gets_no_pages() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(16):
        store(own, bytes([number]) * 32, now_s=1.0)
    own.give(1.0)
    for _ in range(5):
        other.give(2.0)
    assert other.own_pages == 14, "It answers what it was asked once."


class EndedError(Exception):
    """Ends a process at an instruction."""


def end_at(line: int, call: Callable[[], None]) -> bool:
    """Call until this many lines of the directory were begun; return whether that ended it."""
    begun = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal begun
        if frame.f_code.co_filename != directory.__file__:
            return None
        begun += event == "line"
        if begun == line:
            raise EndedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except EndedError:
        if FENCE.locked():
            FENCE.release()  # It ends with the process.
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("has_stored", [False, True])
@pytest.mark.parametrize("victim", ["giver", "receiver"])
def test_a_rank_may_end_at_any_line_of_a_gift(victim: str, has_stored: bool) -> None:
    """Each page has one owner afterwards, and the other rank knows it without a restart."""
    line = 0
    while True:
        line += 1
        own, other = opened(SIXTEEN, 2)
        for number in range(16):
            store(own, bytes([number]) * 32, now_s=1.0)
        if has_stored:
            store(other, KEY, now_s=1.0)
        own.give(1.0)
        other.refresh()
        if victim == "giver":
            is_ended = end_at(line, lambda: other.give(2.0))  # noqa: B023
            other = reopened(other, 2.0)
        else:
            other.give(2.0)
            is_ended = end_at(line, lambda: own.give(2.0))  # noqa: B023
            own = reopened(own, 2.0)
        for each in (own, other):
            each.refresh()
        assert not own._own & other._own, line
        assert own.own_pages + other.own_pages == own.layout.pages, line
        assert not has_stored or other.find(KEY) is not None
        if not is_ended:
            break
    assert line > 50
    assert own.own_pages > 16


def test_blocks_stay_that_were_used_as_late_as_the_others_of_a_rank_that_asks() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(16):
        store(other, bytes([number]) * 32, now_s=1.0)
    for number in range(16):
        store(own, bytes([16 + number]) * 32, now_s=3.0 + number)
    for _ in range(3):
        own.give(20.0)
        other.give(20.0)
    assert (own.own_pages, other.own_pages) == (16, 16)


def test_a_block_that_another_rank_uses_is_not_given() -> None:
    own, other = opened(SIXTEEN, 2)
    pages = [store(other, bytes([number]) * 32, now_s=1.0) for number in range(16)]
    other.settle()
    own.give(10.0)
    assert own.pin(pages[0], bytes([0]) * 32)  # It reads this one, and a task has the next one.
    own.unpin(pages[:1])
    own.add_user(pages[1])
    for second in range(11, 31):
        store(own, bytes([20 + second]) * 32, now_s=float(second))
        for each in (own, other):
            each.give(float(second))
    assert own.own_pages > 18
    assert own.find(bytes([1]) * 32) == pages[1]
    # Its own rank evicts it late, too.
    for number in range(100, 100 + other.own_pages - 1):
        store(other, bytes([number]) * 32, now_s=31.0)
    assert own.find(bytes([1]) * 32) == pages[1]
    own.remove_users([pages[1]])


def test_pages_of_a_reader_that_has_ended_keep_none_of_the_others() -> None:
    """Its pins stay until it is back; young blocks do not go in their place."""
    own, other = opened(SIXTEEN, 2)
    pages = [
        store(other, bytes([number]) * 32, now_s=1.0 if number < 4 else 19.0)
        for number in range(16)
    ]
    own.give(1.0)
    assert all(own.pin(page, bytes([number]) * 32) for number, page in enumerate(pages[:2]))
    for number in range(16):
        store(own, bytes([16 + number]) * 32, now_s=15.0 + number / 8)
    for _ in range(4):
        own.give(20.0)
        other.give(20.0)
    assert own.own_pages == 18
    assert [other.find(bytes([number]) * 32) for number in range(5)] == [
        *pages[:2],
        None,
        None,
        pages[4],
    ]


def test_large_parts_keep_an_eighth() -> None:
    own, other = opened(HostLayout(2, 8_192, 64), 2)
    blocks = [number.to_bytes(32, "big") for number in range(1, 30_000)]

    def store_all(rank: HostDirectory, keys: list[bytes], now_s: float) -> None:
        pages = rank.allocate(keys, 1, now_s)
        rank.complete(pages, 0, rank.tags(pages))

    store_all(other, blocks[:8_192], 1.0)
    for number in range(60):
        first = 8_192 + 256 * number
        store_all(own, blocks[first : first + 256], 10.0 + number)
        own.give(10.0 + number)
        other.give(10.0 + number)
    assert other.own_pages == 1_024


def test_what_is_never_completed_is_given_at_last() -> None:
    own, other = opened(SIXTEEN, 2)
    assert other.allocate([bytes([number]) * 32 for number in range(16)], 1, 1.0)
    late_s = WRITE_LIMIT_S + 2
    for number in range(16):
        store(own, bytes([16 + number]) * 32, now_s=late_s)
    for _ in range(3):
        own.give(late_s)
        other.give(late_s)
    assert own.own_pages == 18


def test_old_asks_of_a_rank_that_has_ended_are_answered_once() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(16):
        store(own, bytes([number]) * 32, now_s=1.0)
    own.give(1.0)
    for _ in range(3):
        other.give(2.0)
        other = reopened(other, 2.0)
    assert other.own_pages == 14


def test_a_reader_that_missed_much_gets_its_pages() -> None:
    own, other = opened(HostLayout(2, 64, 64), 2)
    for number in range(64):
        store(own, bytes([number]) * 32, now_s=1.0)
    own.give(1.0)
    other.give(2.0)
    assert other.own_pages == 56
    for number in range(JOURNAL_WORDS + 10):
        store(other, number.to_bytes(4, "little") * 8, now_s=2.0)
    own.refresh()
    assert own.own_pages == 72


def test_each_rank_keeps_pages_to_store_at_once() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(60):
        store(own, number.to_bytes(32, "big"), now_s=float(number))
        for each in (own, other):
            each.give(float(number))
    assert (own.own_pages, other.own_pages) == (30, 2)
    assert {store(other, bytes([number]) * 32, now_s=60.0) for number in (70, 71)} == other._own


def test_free_and_old_pages_together_are_no_more_than_was_asked_for() -> None:
    own, other = opened(SIXTEEN, 2)
    for number in range(13):
        store(other, bytes([number]) * 32, now_s=1.0 if number < 12 else 19.0)
    for number in range(16):
        store(own, bytes([16 + number]) * 32, now_s=20.0)
    words = own._words
    before = [words[own.layout.entry_word(page)] for page in range(32)]
    own.give(20.0)
    other.give(20.0)
    # One of three free pages, as it stores and wants two itself, and one of an old block.
    changed = [page for page in range(32) if words[own.layout.entry_word(page)] != before[page]]
    assert changed == [16, 29]
    assert all(words[own.layout.entry_word(page)] == before[page] + 2 for page in changed)
    own.give(20.0)
    assert own.own_pages == 18
    # They are still its own, and free, in its next process.
    anew = reopened(own, 20.0)
    assert anew.own_pages == 18
    assert anew.used_pages == 16
    assert {store(anew, bytes([number]) * 32, now_s=21.0) for number in (50, 51)} == {16, 29}
    other.refresh()
    assert other.own_pages == 14
    assert other.find(bytes([0]) * 32) is None

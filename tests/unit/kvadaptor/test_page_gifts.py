"""Ranks that give each other host pages, rule by rule."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvadaptor.fence import FENCE
from kvadaptor.host import directory
from kvadaptor.host.directory import WRITE_LIMIT_S, HostDirectory
from kvadaptor.host.layout import JOURNAL_WORDS, HostLayout
from tests.harness.kv.host_directories import opened, reopened, store

KEY = bytes(range(32))
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


@pytest.mark.parametrize("wanted", [1, 32])
def test_many_blocks_that_another_rank_uses_stay(wanted: int) -> None:
    own, other = opened(HostLayout(2, 4_096, 64), 2)
    keys = [number.to_bytes(32, "big") for number in range(1, 4_097)]
    pages = other.allocate(keys, 1, 1.0)
    other.entries.complete(pages, 0, other.entries.tags(pages))
    other.settle()
    own.give(100.0)
    for page in pages[:3_000]:
        own.add_user(page)
    assert other._give(0, wanted, 100_000) == wanted
    assert all(other.find(key) is not None for key in keys[:3_000])
    # Its own blocks go in this order, too.
    more = [number.to_bytes(32, "big") for number in range(5_000, 5_100)]
    assert len(other.allocate(more, 1, 101.0)) == 100
    assert all(other.find(key) is not None for key in keys[:3_000])


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
        rank.entries.complete(pages, 0, rank.entries.tags(pages))

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

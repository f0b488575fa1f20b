"""The entries of host pages in the memory that the cell's ranks share; see `HostDirectory`."""

from collections.abc import Iterable, Sequence

from kvadaptor.fence import FENCE
from kvadaptor.host.layout import (
    ENTRY_WORDS,
    HASH_BYTES,
    SHARES_MAX,
    WORD_BYTES,
    HostLayout,
    HostMemoryError,
)

_GENERATION, _SHARES, _HASH, _COMPLETE, _USED = 0, 1, 2, 6, 8
_TAGS = 255
_NO_SHARES = bytes(SHARES_MAX)


class PageEntries:
    """What each page has, whether it is complete, when it was used, and who reads it."""

    def __init__(self, memory: memoryview, layout: HostLayout) -> None:
        """`memory` is writable and holds the bytes before `layout.data_at`."""
        self._bytes = memory
        self._words = memory[: WORD_BYTES * layout.ranks * layout.part_words].cast("Q")
        self._places = [layout.entry_word(page) for page in range(layout.pages)]
        self._pins = [layout.pins_at(each) for each in range(layout.ranks)]
        """Where each rank counts how often it has pinned each page."""

    # ------------------------------------------------------------------ for every rank

    def hash_of(self, page: int) -> bytes | None:
        """Return the hash in a page's entry; None if it has none or changes right now."""
        word = self._places[page]
        generation = self._words[word + _GENERATION]
        if generation % 2 or not self._words[word + _SHARES]:
            return None
        first = WORD_BYTES * (word + _HASH)
        key = bytes(self._bytes[first : first + HASH_BYTES])
        return key if self._words[word + _GENERATION] == generation else None

    def is_complete(self, page: int) -> bool:
        """Return whether all members of the group that fills a page have written their shares."""
        word = self._places[page]
        generation, shares = self._words[word + _GENERATION], self._words[word + _SHARES]
        if generation % 2 or not shares:
            return False
        at = self._complete_at(page)
        return bytes(self._bytes[at : at + shares]) == bytes([_tag(generation)]) * shares

    def is_pinned(self, page: int) -> bool:
        """Return whether any rank reads a page."""
        return any(self._bytes[first + page] for first in self._pins)

    def used_ms(self, page: int) -> int:
        """Return when a page was used last, as any rank has marked it."""
        used_ms: int = self._words[self._places[page] + _USED]
        return used_ms

    def mark(self, page: int, at_ms: int) -> None:
        """Mark a page of any rank as used at this time."""
        self._words[self._places[page] + _USED] = at_ms

    def tags(self, pages: Sequence[int]) -> list[int]:
        """Return the tags with which members mark their shares of pages."""
        words, places = self._words, self._places
        return [_tag(words[places[page] + _GENERATION]) for page in pages]

    def is_written(self, page: int, tag: int) -> bool:
        """Return whether all members have marked their shares of a page with this tag.

        Or never will, as the page is to hold another block.
        """
        now = _tag(self._words[self._places[page] + _GENERATION])
        return now != tag or self.is_complete(page)

    def complete(self, pages: Sequence[int], share: int, tags: Sequence[int]) -> None:
        """Mark that share `share` of these pages, of any ranks, is written."""
        memory = self._bytes
        with FENCE:
            for page, tag in zip(pages, tags, strict=True):
                memory[self._complete_at(page) + share] = tag

    # ------------------------------------------------------------------ for the owner of a page

    def take(self, pages: Sequence[int]) -> list[int]:
        """Make the generations of these pages odd; return those that nobody has pinned."""
        words, memory, places = self._words, self._bytes, self._places
        for page in pages:
            words[places[page] + _GENERATION] += 1
        with FENCE:
            pass
        pinned = {page for first in self._pins for page in pages if memory[first + page]}
        for page in pinned:
            # A reader that looked meanwhile finds an odd generation and looks elsewhere.
            words[places[page] + _GENERATION] -= 1
        return [page for page in pages if page not in pinned] if pinned else list(pages)

    def fill(self, page: int, key: bytes, shares: int, at_ms: int) -> None:
        """Let a page that was taken have a block, of which members write this many shares."""
        word = self._places[page]
        self._words[word + _SHARES] = shares
        self._words[word + _USED] = at_ms
        first = WORD_BYTES * (word + _HASH)
        self._bytes[first : first + HASH_BYTES + SHARES_MAX] = key + _NO_SHARES

    def clear(self, page: int) -> None:
        """Let a page that was taken have no block."""
        self._words[self._places[page] + _SHARES] = 0

    def end_changes(self, pages: Iterable[int]) -> None:
        """Make the generations of pages that were taken even again."""
        with FENCE:
            for page in pages:
                self._words[self._places[page] + _GENERATION] += 1

    def is_changing(self, page: int) -> bool:
        """Return whether a page was taken and its entry is not changed to the end."""
        return bool(self._words[self._places[page] + _GENERATION] % 2)

    def shares(self, page: int) -> int:
        """Return how many members write a page; 0 if it has no block."""
        shares: int = self._words[self._places[page] + _SHARES]
        return shares

    def _complete_at(self, page: int) -> int:
        return WORD_BYTES * (self._places[page] + _COMPLETE)


assert WORD_BYTES * _USED == WORD_BYTES * _COMPLETE + SHARES_MAX
assert ENTRY_WORDS == _USED + 1


def _tag(generation: int) -> int:
    """Return the completeness tag of an even generation; never 0."""
    return generation // 2 % _TAGS + 1


def padded_key(key: bytes) -> bytes:
    """Return a block hash in the length of entries; raises `HostMemoryError` if it is longer."""
    if len(key) > HASH_BYTES:
        raise HostMemoryError(
            f"a block hash has {len(key)} bytes, and host pages are found by {HASH_BYTES} at most: "
            "choose sha256 as --prefix-caching-hash-algo."
        )
    return key.ljust(HASH_BYTES, b"\0")

"""Where the pieces of a cell's host memory lie: one part per rank, and the pages. Pure.

A host page holds what one dp block holds, in dp's form: per layer its KV heads, per head b tokens.
Members of wide groups write and read the layers and heads that they hold, so a page has the same
bytes whichever group wrote it (Seesaw, section 4.2, with heads outermost as in its section 5.2).
"""

from dataclasses import dataclass

WORD_BYTES = 8
ENTRY_WORDS = 9
"""Words of a page's entry: generation, shares, four of its hash, two of completeness bytes, and the
time of its last use, which every rank writes."""

HASH_BYTES = 32
SHARES_MAX = 16
"""Maximum members that write one page: a byte of the entry for each."""

JOURNAL_WORDS = 8_192
JOURNAL_AT_ONCE = 512
"""Changes of a part that its journal holds, and those that its rank writes before it counts them.

A reader that lags by more than their difference reads all entries of the part again.
"""

_HEADER_WORDS = 8
_ALIGNMENT = 4_096


class HostMemoryError(ValueError):
    """Host memory that cannot hold what it should; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Sizes and offsets, in bytes and words of 8 bytes; pages are numbered over all ranks."""

    ranks: int
    pages_per_rank: int
    page_bytes: int

    @property
    def pages(self) -> int:
        """All pages."""
        return self.ranks * self.pages_per_rank

    @property
    def part_words(self) -> int:
        """Words of one rank's part: header, journal, entries."""
        return _HEADER_WORDS + JOURNAL_WORDS + ENTRY_WORDS * self.pages_per_rank

    def count_word(self, rank: int) -> int:
        """Return the word that counts the changes of a rank's part."""
        return rank * self.part_words

    def ready_word(self, rank: int) -> int:
        """Return the word that is 1 once a rank can copy pages."""
        return rank * self.part_words + 1

    def wanted_word(self, rank: int) -> int:
        """Return the word with the pages that a rank wants, in 16 bits, after a count of asks."""
        return rank * self.part_words + 2

    def oldest_word(self, rank: int) -> int:
        """Return the word with the time when the page that a rank evicts next was used, in ms."""
        return rank * self.part_words + 3

    def journal_word(self, rank: int, number: int) -> int:
        """Return the word with the page of the rank's change of this number."""
        return rank * self.part_words + _HEADER_WORDS + number % JOURNAL_WORDS

    def entry_word(self, page: int) -> int:
        """Return the first word of a page's entry."""
        rank, own = divmod(page, self.pages_per_rank)
        first = rank * self.part_words + _HEADER_WORDS + JOURNAL_WORDS
        return first + ENTRY_WORDS * own

    def pages_of(self, rank: int) -> range:
        """Return the pages that a rank has at first; see `owners_at`."""
        return range(rank * self.pages_per_rank, (rank + 1) * self.pages_per_rank)

    def pins_at(self, rank: int) -> int:
        """Return the offset of a rank's pins, a byte for each page."""
        return WORD_BYTES * self.ranks * self.part_words + rank * self.pages

    @property
    def owners_at(self) -> int:
        """The offset of the owners, a byte for each page: 1 + the rank; 0 while it is the first."""
        return self.pins_at(self.ranks)

    @property
    def data_at(self) -> int:
        """The offset of the pages."""
        end = self.owners_at + self.pages
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    @property
    def total_bytes(self) -> int:
        """The size of all."""
        return self.data_at + self.pages * self.page_bytes


def layout_of(budget_bytes: int, ranks: int, page_bytes: int) -> HostLayout:
    """Return the layout of most pages within a budget; raises `HostMemoryError` if it has none."""
    empty = HostLayout(ranks, 0, page_bytes)
    of_page = page_bytes + ENTRY_WORDS * WORD_BYTES + ranks + 1
    pages = (budget_bytes - empty.data_at - _ALIGNMENT) // (ranks * of_page)
    if pages < 1:
        need = empty.data_at + _ALIGNMENT + ranks * of_page
        raise HostMemoryError(
            f"{budget_bytes} bytes of host memory hold no KV page for each of {ranks} ranks: give "
            f"at least {need} bytes (--host-kv)."
        )
    return HostLayout(ranks, pages, page_bytes)

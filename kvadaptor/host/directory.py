"""Which block lies in which host page: a directory in the memory that the cell's ranks share.

Each rank allocates the pages alone that it owns and reads those of all. No lock is shared, so a
process may end at any instruction. Invariants:

- A page has one owner, who alone changes its entry and names the next owner. At first these are
  equal parts. A rank with few free pages gets those of ranks whose blocks were used before.

- A page's generation is odd while its entry changes and even otherwise. It grows with each change.
- A page is *complete* once each member of the group that fills it has written the tag of the
  generation into its own completeness byte, after its share of the page.
- Who reads a page pins it first, in an array of its own, and then looks at the entry again. Who
  evicts a page makes its generation odd first, and then looks at the pins. One of both gives way.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from math import inf

from kvadaptor.fence import FENCE
from kvadaptor.host.block_index import BlockIndex
from kvadaptor.host.entries import PageEntries, padded_key
from kvadaptor.host.layout import (
    JOURNAL_AT_ONCE,
    JOURNAL_WORDS,
    SHARES_MAX,
    WORD_BYTES,
    HostLayout,
    HostMemoryError,
)

WRITE_LIMIT_S = 60.0
"""How long a page may stay incomplete before it is allocated again: its writer has ended."""

AGE_MARGIN_S = 5.0
"""Blocks make room for those of another rank if they were used longer ago by more than this."""

GIVEN_MAX = 256
"""Pages that a rank gives to others in one pass: about 1 ms."""

USE_PERIOD_S = 1.0
"""How often pages of running tasks are marked as used, and complete pages are counted."""

FREE_SHARE, FREE_MAX = 8, 512
"""A rank wants an eighth of its first pages to be free, but no more than this number. It gives none
away when it has only an eighth left, so that it can store at once when it leads a group again."""

_WANTED_BITS = 16

_LOOKS = 8
"""Pages that are looked at for one that nobody reads."""

_SORTED_MAX = 4_096
"""Pages that are looked at, 1 ms, for those that other ranks have not used since."""

_PINS_MAX = 255


class HostDirectory:
    """One rank's access to the directory; used by its main loop alone."""

    def __init__(self, memory: memoryview, layout: HostLayout, rank: int, now_s: float) -> None:
        """Open the directory, all zeros or as another process of this rank has left it.

        `memory` is writable and holds the bytes before `layout.data_at`. Pins of the rank end, and
        it is not ready to copy pages.
        """
        self.layout = layout
        self.rank = rank
        self._words = memory[: WORD_BYTES * layout.ranks * layout.part_words].cast("Q")
        self._bytes = memory
        self._index = BlockIndex()
        self._read = [0] * layout.ranks
        """How many changes of each part are known."""
        self._own: set[int] = set()
        self._now_s = now_s
        self._free: OrderedDict[int, int] = OrderedDict()
        self._used: OrderedDict[int, int] = OrderedDict()
        """Complete pages of the rank's own and the times of their last use in ms, the longest
        unused first, without those of `_held`."""
        self._held: OrderedDict[int, int] = OrderedDict()
        """Such pages of running tasks; they go when there are no others."""
        self._pending: dict[int, float] = {}
        """Incomplete pages of the rank's own, and when they were allocated."""
        self._users: dict[int, int] = {}
        """How many of the tasks that this rank leads have each page, of any rank."""
        self._own_min = layout.pages_per_rank // FREE_SHARE
        self._free_wanted = min(self._own_min, FREE_MAX)
        self._stored_at_s = -inf
        self._marked_at_s = now_s
        self._asked = [self._words[layout.wanted_word(each)] for each in range(layout.ranks)]
        """What each rank has asked for when this one answered last."""
        self._owners_at = layout.owners_at
        self._owner = rank + 1
        self.entries = PageEntries(memory, layout)
        self._pins_at = at = layout.pins_at(rank)
        self._journal_at = layout.journal_word(rank, 0)
        memory[at : at + layout.pages] = bytes(layout.pages)
        self.set_ready(is_ready=False)
        # A process that ended may have written to its journal, given pages, and counted nothing.
        self._words[layout.count_word(rank)] += JOURNAL_AT_ONCE
        self._adopt(now_s)
        for each in range(layout.ranks):
            self._read_all(each)

    # ------------------------------------------------------------------ readiness

    def set_ready(self, *, is_ready: bool) -> None:
        """Tell all groups of this rank if it can copy pages: until then they use none."""
        self._words[self.layout.ready_word(self.rank)] = is_ready

    def are_ready(self, ranks: Iterable[int]) -> bool:
        """Return whether all of these ranks can copy pages now."""
        return all(self._words[self.layout.ready_word(rank)] for rank in ranks)

    # ------------------------------------------------------------------ readers

    def refresh(self) -> None:
        """Read what other ranks have changed."""
        for rank in range(self.layout.ranks):
            if rank == self.rank:
                continue
            count = self._words[self.layout.count_word(rank)]
            known = self._read[rank]
            most = known + JOURNAL_WORDS - JOURNAL_AT_ONCE
            if count <= most:
                for number in range(known, count):
                    page = self._words[self.layout.journal_word(rank, number)]
                    self._read_entry(page)
                    self._receive(page)
                self._read[rank] = count
            if self._words[self.layout.count_word(rank)] > most:
                # The rank may have written over the words that were read.
                self._read_all(rank)

    def find(self, key: bytes) -> int | None:
        """Return a complete page of this block hash, as last refreshed; None if there is none."""
        pages = self._index.pages(padded_key(key))
        return next((page for page in pages if self.entries.is_complete(page)), None)

    def pin(self, page: int, key: bytes) -> bool:
        """Keep a complete page of this hash from eviction; return False if it is one no more."""
        at = self._pins_at + page
        if self._bytes[at] == _PINS_MAX:
            return False
        self._bytes[at] += 1
        with FENCE:
            pass
        if self.entries.hash_of(page) == padded_key(key) and self.entries.is_complete(page):
            if page in self._pending:
                self._settle(page)
            self._mark(page)
            return True
        self._bytes[at] -= 1
        return False

    def unpin(self, pages: Iterable[int]) -> None:
        """Let pages go that were pinned."""
        first = self._pins_at
        for page in pages:
            self._bytes[first + page] -= 1

    # ------------------------------------------------------------------ writers

    def allocate(self, keys: Sequence[bytes], shares: int, now_s: float) -> list[int]:
        """Return a page for the block of each of these hashes, which are all different.

        If too few pages can be had, only the first hashes get one. `shares` members will each write
        their share and then call `complete`.
        """
        if not 1 <= shares <= SHARES_MAX:
            raise HostMemoryError(
                f"{shares} ranks cannot share a host page: the maximum is {SHARES_MAX}."
            )
        self._now_s = now_s
        if keys:
            self._stored_at_s = now_s
        pages = self._free_pages(len(keys), now_s)
        if not pages:
            return pages
        for page, key in zip(pages, keys, strict=False):
            padded = padded_key(key)
            self.entries.fill(page, padded, shares, int(1e3 * now_s))
            self._pending[page] = now_s
            self._index.enter(page, padded)
        self.entries.end_changes(pages)
        self._journal(pages)
        return pages

    def has(self, key: bytes) -> bool:
        """Return whether a complete page has this block, or one of the rank's own is to have it."""
        pending = self._pending
        pages = self._index.pages(padded_key(key))
        return any(page in pending or self.entries.is_complete(page) for page in pages)

    def settle(self) -> None:
        """Count the pages of the rank's own that have become complete as used."""
        for page in [page for page in self._pending if self.entries.is_complete(page)]:
            self._settle(page)

    def _settle(self, page: int) -> None:
        del self._pending[page]
        self._keep(page)

    def _keep(self, page: int) -> None:
        """Count a page of the rank's own among those that may be evicted, after all others."""
        pages = self._held if page in self._users else self._used
        pages[page] = self.entries.used_ms(page)

    def _mark(self, page: int) -> None:
        """Mark a page of any rank as used now."""
        now_ms = int(1e3 * self._now_s)
        self.entries.mark(page, now_ms)
        for pages in (self._used, self._held):
            if page in pages:
                pages[page] = now_ms
                pages.move_to_end(page)

    def add_user(self, page: int) -> None:
        """Count a task that has a page of any rank: it is evicted late until `remove_users`.

        Late is after all others where the rank owns it; other ranks see that it is used.
        """
        self._users[page] = self._users.get(page, 0) + 1
        self._mark(page)
        if page in self._used:
            self._held[page] = self._used.pop(page)

    def remove_users(self, pages: Iterable[int]) -> None:
        """Take back `add_user`."""
        for page in pages:
            count = self._users.get(page, 0) - 1
            if count > 0:
                self._users[page] = count
                continue
            self._users.pop(page, None)
            if page in self._held:
                self._used[page] = self._held.pop(page)

    @property
    def own_pages(self) -> int:
        """Pages that the rank owns."""
        return len(self._own)

    @property
    def used_pages(self) -> int:
        """Pages of the rank's own with a block."""
        return len(self._used) + len(self._held) + len(self._pending)

    # ------------------------------------------------------------------ pages for other ranks

    def give(self, now_s: float) -> None:
        """Ask for pages if this rank stores and few are free; give pages to others that ask.

        A rank gives what is free, and blocks that were used longer ago than all of the other's. So
        the leader of a wide group, which stores for all members, has the pages of all.
        """
        self._now_s = now_s
        self.refresh()
        if now_s - self._marked_at_s >= USE_PERIOD_S:
            self._marked_at_s = now_s
            self.settle()
            for page in self._users:
                self._mark(page)
        if now_s - next(iter(self._pending.values()), now_s) > WRITE_LIMIT_S:
            self._give_up_late(now_s)
        self._ask()
        words, layout, rest = self._words, self.layout, GIVEN_MAX
        for rank in range(layout.ranks):
            asked = words[layout.wanted_word(rank)]
            # A rank that has ended asks no more.
            if rank != self.rank and asked != self._asked[rank]:
                self._asked[rank] = asked
                # All others give a part.
                wanted = -(-(asked % (1 << _WANTED_BITS)) // (layout.ranks - 1))
                rest -= self._give(rank, min(wanted, rest), words[layout.oldest_word(rank)])

    def _ask(self) -> None:
        wanted = self._free_wanted - len(self._free)
        if wanted <= 0 or not self._is_storing:
            return
        words, layout = self._words, self.layout
        words[layout.oldest_word(self.rank)] = self._oldest_ms()
        word = layout.wanted_word(self.rank)
        words[word] = (words[word] >> _WANTED_BITS) + 1 << _WANTED_BITS | wanted

    @property
    def _is_storing(self) -> bool:
        return self._now_s - self._stored_at_s < AGE_MARGIN_S

    def _oldest_ms(self) -> int:
        """Return when the page was used that this rank evicts next."""
        for pages in (self._used, self._held):
            self._sort(pages, _LOOKS)
            for page, at_ms in islice(pages.items(), _LOOKS):
                if not self.entries.is_pinned(page):
                    return max(at_ms, self.entries.used_ms(page))
        return int(1e3 * self._now_s)

    def _give(self, rank: int, wanted: int, oldest_ms: int) -> int:
        """Give a rank pages that are free, or whose blocks are older than all of its own."""
        count = min(wanted, len(self._own) - self._own_min)
        if count <= 0:
            return 0
        spare = max(0, len(self._free) - (self._free_wanted if self._is_storing else 0))
        pages = self._evict(self._free, min(count, spare))
        count -= len(pages)
        self._sort(self._used, count + _LOOKS)
        least_ms = oldest_ms - int(1e3 * AGE_MARGIN_S)
        first = islice(self._used.items(), count + _TRIES)
        used_ms = self.entries.used_ms
        old = [
            page
            for page, _ in takewhile(lambda item: item[1] < least_ms, first)
            if used_ms(page) < least_ms
        ]
        pages += self._remove(self._used, old, count)
        for page in pages:
            self.entries.clear(page)
            self._index.enter(page, None)
            self._own.remove(page)
        self._write_journal(pages)
        self.entries.end_changes(pages)
        with FENCE:
            for page in pages:
                self._bytes[self._owners_at + page] = rank + 1
        self._count_journal(len(pages))
        return len(pages)

    def _receive(self, page: int) -> None:
        """Own a page if its owner has given it to this rank."""
        if self._bytes[self._owners_at + page] == self._owner and page not in self._own:
            with FENCE:
                self._own.add(page)
            self._users.pop(page, None)
            self._free[page] = 0

    def _pages_of(self, *ranks: int) -> list[int]:
        """Return the pages that any of these ranks owns, or had at first."""
        first, owners = self._owners_at, {rank + 1 for rank in ranks}
        marks = bytes(self._bytes[first : first + self.layout.pages])
        given = [page for page, mark in enumerate(marks) if mark in owners]
        return sorted({*given, *(page for each in ranks for page in self.layout.pages_of(each))})

    # ------------------------------------------------------------------ inside

    def _free_pages(self, count: int, now_s: float) -> list[int]:
        """Take this many pages of the rank's own, or fewer; their generations are then odd."""
        if len(self._pending) >= min(_PENDING_MAX, len(self._own) // _PENDING_SHARE):
            self.settle()
        taken = self._evict(self._free, count)
        if now_s - next(iter(self._pending.values()), now_s) > WRITE_LIMIT_S:
            self._give_up_late(now_s)
        taken += self._evict(self._used, count - len(taken))
        if len(taken) < count:
            self.settle()
            for pages in (self._used, self._held):
                taken += self._evict(pages, count - len(taken))
        return taken

    def _evict(self, pages: OrderedDict[int, int], count: int) -> list[int]:
        """Take this many pages of these, the first ones that nobody has pinned."""
        if not count:
            return []
        self._sort(pages, count + _LOOKS)
        return self._remove(pages, list(islice(pages, count + _TRIES)), count)

    def _remove(self, pages: OrderedDict[int, int], tries: Iterable[int], count: int) -> list[int]:
        """Take the first ones of these that nobody has pinned."""
        taken: list[int] = []
        rest = iter(tries)
        while wanted := list(islice(rest, count - len(taken))):
            for page in (found := self.entries.take(wanted)):
                del pages[page]
                self._users.pop(page, None)
            taken += found
        return taken

    def _sort(self, pages: OrderedDict[int, int], count: int) -> None:
        """Move pages that other ranks have used since to the end, so that `count` others lead."""
        if pages is self._free:
            return
        used_ms, later = self.entries.used_ms, []
        for page, at_ms in islice(pages.items(), _SORTED_MAX):
            if used_ms(page) > at_ms:
                later.append(page)
            else:
                count -= 1
                if count <= 0:
                    break
        for page in later:
            pages[page] = used_ms(page)
            pages.move_to_end(page)

    def _give_up_late(self, now_s: float) -> None:
        """Let pages go first that have been incomplete for too long."""
        self.settle()
        for page, at_s in list(self._pending.items()):
            if now_s - at_s <= WRITE_LIMIT_S:
                break  # Those after it are younger.
            self.entries.mark(page, 0)
            self._settle(page)
            (self._held if page in self._users else self._used).move_to_end(page, last=False)

    def _adopt(self, now_s: float) -> None:
        """Take over what another process of this rank has left."""
        complete: list[int] = []
        for page in self._pages_of(self.rank):
            if self._bytes[self._owners_at + page] not in (0, self._owner):
                continue
            self._own.add(page)
            if self.entries.is_changing(page):
                # It ended while it changed this entry, so nobody has written to the page since.
                self.entries.clear(page)
                self.entries.end_changes([page])
                self._journal([page])
                self._free[page] = 0
            elif not self.entries.shares(page):
                self._free[page] = 0
            elif self.entries.is_complete(page):
                complete.append(page)
            else:
                self._pending[page] = now_s
        for page in sorted(complete, key=self.entries.used_ms):
            self._keep(page)

    def _journal(self, pages: Sequence[int]) -> None:
        for first in range(0, len(pages), JOURNAL_AT_ONCE):
            part = pages[first : first + JOURNAL_AT_ONCE]
            self._write_journal(part)
            self._count_journal(len(part))

    def _count_journal(self, count: int) -> None:
        """Let others read this many pages more."""
        with FENCE:
            self._words[self.layout.count_word(self.rank)] += count

    def _write_journal(self, pages: Sequence[int]) -> None:
        """Write these pages, at most `JOURNAL_AT_ONCE`, where others look once they are counted."""
        for number, page in enumerate(pages, self._words[self.layout.count_word(self.rank)]):
            self._words[self._journal_at + number % JOURNAL_WORDS] = page

    def _read_all(self, rank: int) -> None:
        self._read[rank] = self._words[self.layout.count_word(rank)]
        for page in self._pages_of(rank, self.rank):
            if self.entries.shares(page) or page in self._index:
                self._read_entry(page)
            self._receive(page)

    def _read_entry(self, page: int) -> None:
        self._index.enter(page, self.entries.hash_of(page))


_PENDING_MAX, _PENDING_SHARE = 64, 16
"""Incomplete pages, as far as is known, before an allocation looks at all of them again: at most a
16th of the rank's own, as none of them is evicted in its turn before that."""

_TRIES = 64
"""Pages that an allocation tries to evict; readers pin only what they load in one step."""

assert GIVEN_MAX <= JOURNAL_AT_ONCE

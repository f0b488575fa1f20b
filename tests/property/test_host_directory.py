"""The directory of host pages: a reader finds the block that it looks for in the page."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.host.directory import (
    AGE_MARGIN_S,
    FREE_MAX,
    FREE_SHARE,
    WRITE_LIMIT_S,
    HostDirectory,
)
from kvadaptor.host.layout import HostLayout, layout_of

PAGE_BYTES = 64
STEPS = 120


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


@dataclass
class Ranks:
    """Some ranks over one memory, and what a reader of each page must find there."""

    layout: HostLayout
    now_s: float = 0.0
    content: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Page -> share -> the block that was written last."""
    pinned: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(reader, page, block)."""
    open_writes: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    """(page, share, tag, block) that a member has still to write."""

    def __post_init__(self) -> None:
        self.memory = memoryview(bytearray(self.layout.data_at))
        self.directories = [self.open(rank) for rank in range(self.layout.ranks)]

    def open(self, rank: int) -> HostDirectory:
        return HostDirectory(self.memory, self.layout, rank, self.now_s)

    def allocate(self, rank: int, keys: list[bytes], shares: int) -> None:
        own = self.directories[rank]
        pages = own.allocate(keys, shares, self.now_s)
        pinned = {page for _, page, _ in self.pinned}
        assert len(set(pages)) == len(pages)
        assert set(pages) <= own._own - pinned
        if len(pages) < len(keys):
            assert own._own <= pinned | set(own._pending)
        for page, key, tag in zip(pages, keys, own.entries.tags(pages), strict=False):
            self.open_writes += [(page, share, tag, key) for share in range(shares)]

    def give(self, rank: int) -> None:
        self.directories[rank].give(self.now_s)

    def write(self, number: int) -> None:
        page, share, tag, key = self.open_writes.pop(number % len(self.open_writes))
        self.content.setdefault(page, {})[share] = key
        # Any rank may be the member that writes.
        self.directories[number % self.layout.ranks].entries.complete([page], share, [tag])

    def store(self, rank: int, keys: list[bytes]) -> None:
        """Store whole blocks, as many as find a page."""
        own = self.directories[rank]
        pages = own.allocate(keys, 1, self.now_s)
        own.entries.complete(pages, 0, own.entries.tags(pages))

    def pin(self, rank: int, key: bytes) -> None:
        own = self.directories[rank]
        own.refresh()
        page = own.find(key)
        if page is not None and own.pin(page, key):
            self.pinned.append((rank, page, key))

    def unpin(self, number: int) -> None:
        rank, page, _ = self.pinned.pop(number % len(self.pinned))
        self.directories[rank].unpin([page])

    def restart(self, rank: int) -> None:
        """End a rank's process: what it was about to write is never written."""
        self.pinned = [each for each in self.pinned if each[0] != rank]
        self.directories[rank] = self.open(rank)

    def check(self) -> None:
        owned = [page for own in self.directories for page in own._own]
        assert len(owned) == len(set(owned)), "Several ranks would change one entry."
        for _, page, key in self.pinned:
            shares = self.content[page]
            first = self.layout.entry_word(page)
            count = self.directories[0]._words[first + 1]
            assert {shares[share] for share in range(count)} == {key}


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), pages=st.integers(1, 20))
def test_a_pinned_page_holds_its_block(seed: int, ranks: int, pages: int) -> None:
    draw = random.Random(seed)
    cell = Ranks(HostLayout(ranks, pages, PAGE_BYTES))
    for _ in range(STEPS):
        rank, key = draw.randrange(ranks), key_of(draw.randrange(1, 9))
        match draw.randrange(12):
            case 0 | 1 | 2:
                keys = [key_of(each) for each in draw.sample(range(1, 9), draw.choice((1, 2, 5)))]
                cell.allocate(rank, keys, draw.choice((1, 2, 4)))
            case 3 | 4 | 5 if cell.open_writes:
                cell.write(draw.randrange(1 << 16))
            case 6 | 7:
                cell.pin(rank, key)
            case 8 if cell.pinned:
                cell.unpin(draw.randrange(1 << 16))
            case 9 if draw.random() < 0.2:
                cell.restart(rank)
            case 10 | 11:
                cell.give(rank)
            case _:
                cell.now_s += 1.0
        cell.check()
        # No member writes after this limit.
        if draw.random() < 0.02:
            cell.open_writes.clear()
            cell.now_s += WRITE_LIMIT_S + 1
    # A rank that missed a gift has it once it reads what the others have written.
    for own in cell.directories:
        own.refresh()
    assert {page for own in cell.directories for page in own._own} == set(range(cell.layout.pages))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4))
def test_readers_know_what_writers_have_written(seed: int, ranks: int) -> None:
    """Another rank finds the same blocks as the one that opens the directory anew."""
    draw = random.Random(seed)
    cell = Ranks(HostLayout(ranks, 5, PAGE_BYTES))
    for _ in range(STEPS):
        cell.allocate(draw.randrange(1, ranks), [key_of(draw.randrange(1, 30))], 1)
        while cell.open_writes:
            cell.write(0)
        if draw.random() < 0.1:
            cell.directories[0].refresh()
    cell.directories[0].refresh()
    fresh = cell.open(0)
    for number in range(1, 30):
        found, anew = cell.directories[0].find(key_of(number)), fresh.find(key_of(number))
        assert (found is None) == (anew is None)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 5),
    pages=st.integers(1, 150),
    batch=st.sampled_from((1, 7, 200)),
)
def test_a_rank_that_stores_alone_has_the_pages_of_all(
    seed: int, ranks: int, pages: int, batch: int
) -> None:
    """The leader of a wide group stores for all members; the blocks of before are older."""
    draw, batch = random.Random(seed), min(batch, max(1, pages // 2))
    cell = Ranks(HostLayout(ranks, pages, PAGE_BYTES))
    cell.now_s = 1_000.0
    count = cell.layout.pages + max(2 * cell.layout.pages, 2 * FREE_SHARE * ranks * batch)
    keys = [number.to_bytes(32, "big") for number in range(1, count)]
    spread, led = keys[: cell.layout.pages], keys[cell.layout.pages :]
    for key in spread:
        cell.store(draw.randrange(ranks), [key])
    leader = draw.randrange(ranks)
    own = cell.directories[leader]
    for first in range(0, len(led), batch):
        cell.now_s += AGE_MARGIN_S
        cell.store(leader, led[first : first + batch])
        for _ in range(ranks):
            for rank in draw.sample(range(ranks), ranks):
                cell.give(rank)
    rest = (ranks - 1) * (pages // FREE_SHARE)
    if pages < FREE_SHARE:
        assert own._own == set(cell.layout.pages_of(leader)), "Parts this small stay as they are."
        return
    assert len(own._own) == cell.layout.pages - rest
    free = min(pages // FREE_SHARE, FREE_MAX)
    found = [key for key in led if own.find(key) is not None]
    assert found == led[len(led) - len(found) :], "The oldest go first."
    assert len(found) >= cell.layout.pages - rest - free - 2 * batch
    # Another rank leads now.
    other = draw.randrange(ranks)
    cell.store(other, keys[:1])
    assert cell.directories[other].find(keys[0]) is not None, "It has a page at once."


@settings(max_examples=200)
@given(budget=st.integers(1 << 16, 1 << 32), ranks=st.integers(1, 16), page=st.integers(1, 1 << 22))
def test_a_layout_fills_its_budget(budget: int, ranks: int, page: int) -> None:
    smallest = HostLayout(ranks, 1, page).total_bytes + 4_096
    if budget < smallest:
        return
    layout = layout_of(budget, ranks, page)
    assert layout.total_bytes <= budget
    more = HostLayout(ranks, layout.pages_per_rank + 1, page)
    assert more.total_bytes > budget - 2 * 4_096
    words = [layout.entry_word(page) for rank in range(ranks) for page in layout.pages_of(rank)[:2]]
    assert len(set(words)) == len(words)
    assert layout.pins_at(ranks) <= layout.data_at


@pytest.mark.parametrize("pages", [1, 3])
def test_the_longest_unused_page_goes_first_and_running_tasks_last(pages: int) -> None:
    cell = Ranks(HostLayout(1, pages, PAGE_BYTES))
    (own,) = cell.directories
    for number in range(1, pages + 1):
        cell.allocate(0, [key_of(number)], 1)
        cell.write(0)
    own.settle()
    used = own.find(key_of(1))
    assert used is not None
    own.add_user(used)
    cell.allocate(0, [key_of(100)], 1)
    cell.write(0)
    gone = [number for number in range(1, pages + 1) if own.find(key_of(number)) is None]
    # A page of a running task goes only where there is no other.
    assert gone == ([1] if pages == 1 else [2])

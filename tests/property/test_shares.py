"""Blocks that a group of any split has written are read in any other, byte for byte."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from comm_pool.layout import Rank, lease_key
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import DirectoryShape, GroupDirectory
from kvadaptor.host.directory import WRITE_LIMIT_S, HostDirectory
from kvadaptor.host.layout import HostLayout
from kvadaptor.host.page_copies import PageCopier, PageCopies
from kvadaptor.shares import Share, holder_of, pieces_of, share_of
from kvadaptor.slot_table import SlotTable
from tests.harness.worker.kv_copies import CopyKind, copies_of
from worker.engine.lost_kv import LostKV
from worker.engine.scheduling.block_copies import BlockCopies

SPLITS = [Split(pp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4) if pp * tp <= 8]
PAGES, WORLD, FORMATION, STEPS = 3, 8, 5, 150
Bytes = npt.NDArray[np.uint8]


def geometry(layers: int, heads: int) -> PageGeometry:
    return PageGeometry(layers, heads, head_dim_k=1, head_dim_v=1, dtype_bytes=1, tokens_per_slot=2)


GEOMETRIES = [geometry(layers, heads) for layers in (4, 8) for heads in (1, 2, 4, 8)]


def content_of(sizes: PageGeometry, key: int) -> Bytes:
    """What a block holds: (layers, heads, bytes)."""
    shape = sizes.num_layers, sizes.num_kv_heads, sizes.layer_page_bytes // sizes.num_kv_heads
    return np.random.default_rng(key).integers(0, 256, shape, dtype=np.uint8)


class Member:
    """A rank's memory, and where it has the blocks of its group: anywhere in it."""

    def __init__(
        self, sizes: PageGeometry, split: Split, place: int, kv: Bytes, seed: int = 0
    ) -> None:
        self.sizes, self.split, self.place, self.kv = sizes, split, place, kv
        self.slots = sizes.slots(split)
        self.share: Share = share_of(sizes, split, place)
        self.table = SlotTable(PAGES, self.slots.count, self.slots)
        moved = np.random.default_rng(seed).permutation(PAGES)
        self.table.map(np.arange(PAGES), moved)

    @property
    def own(self) -> tuple[slice, slice]:
        """The layers and heads that it computes, by its place alone."""
        stage, part = divmod(self.split.share_of(self.place), self.split.tp)
        layers, heads = self.slots.layers, self.slots.heads
        first = part * self.sizes.num_kv_heads // self.split.tp
        return slice(stage * layers, (stage + 1) * layers), slice(first, first + heads)

    def of(self, block: int) -> Bytes:
        """The view that its kernels have of a block: (layers, bytes)."""
        (number,) = self.table.slots([block])
        run = self.sizes.layer_page_bytes // self.slots.columns
        pitch = PAGES * self.sizes.layer_page_bytes
        flat = self.kv.reshape(-1)
        at = [number * run + layer * pitch for layer in range(self.slots.layers)]
        return np.stack([flat[first : first + run] for first in at])

    def put(self, block: int, content: Bytes) -> None:
        """Compute a block: only its own layers and heads."""
        (number,) = self.table.slots([block])
        run = self.sizes.layer_page_bytes // self.slots.columns
        rows = content[self.own].reshape(self.slots.layers, run)
        for layer, row in enumerate(rows):
            first = number * run + layer * PAGES * self.sizes.layer_page_bytes
            self.kv.reshape(-1)[first : first + run] = row

    def has(self, block: int, content: Bytes) -> bool:
        return bool((self.of(block) == content[self.own].reshape(self.slots.layers, -1)).all())


def memory_of(sizes: PageGeometry) -> Bytes:
    return np.zeros((sizes.num_layers, PAGES * sizes.layer_page_bytes), np.uint8)


@pytest.mark.parametrize("sizes", GEOMETRIES, ids=str)
def test_pieces_of_a_share_cover_its_layers_and_heads_once(sizes: PageGeometry) -> None:
    for source in SPLITS:
        for target in SPLITS:
            there, here = sizes.slots(source), sizes.slots(target)
            seen = []
            for share in range(here.count):
                found = pieces_of(there, here, share)
                for piece in found.pieces:
                    row, column = divmod(piece.share, there.columns)
                    of_source = row * there.layers + piece.source_layer
                    width = found.columns // there.columns
                    part = column * width + piece.source_column
                    row, column = divmod(share, here.columns)
                    assert of_source == row * here.layers + piece.target_layer
                    width = found.columns // here.columns
                    assert part == column * width + piece.target_column
                    seen.append((of_source, part))
                    assert piece.source_layer + found.layers <= there.layers
            layers, columns = range(0, sizes.num_layers, found.layers), range(found.columns)
            assert sorted(seen) == [(layer, part) for layer in layers for part in columns]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("sizes", GEOMETRIES, ids=str)
def test_each_share_has_one_writer(sizes: PageGeometry, split: Split) -> None:
    key = lease_key(tuple(map(Rank, range(split.width))), split.pp)
    writers: dict[int, int] = {}
    for place in range(split.width):
        share = share_of(sizes, split, place)
        if share.is_first:
            assert share.number not in writers
            writers[share.number] = place
            assert key[holder_of(share.slots, split.tp, share.number)] == place
    assert sorted(writers) == list(range(sizes.slots(split).count))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.sampled_from(GEOMETRIES),
    there=st.sampled_from(SPLITS),
    here=st.sampled_from(SPLITS),
    kind=st.sampled_from(CopyKind),
    seed=st.integers(0, 2**20),
)
def test_blocks_of_a_lost_group_are_read_in_each_split(
    sizes: PageGeometry, there: Split, here: Split, kind: CopyKind, seed: int
) -> None:
    if any(sizes.slots(each).count < each.width for each in (there, here)):
        kind = CopyKind.ARRAYS
    kv = {Rank(rank): memory_of(sizes) for rank in range(WORLD)}
    ranks = tuple(map(Rank, range(there.width)))
    key, slots = lease_key(ranks, there.pp), sizes.slots(there)
    shape = DirectoryShape(key, PAGES, slots.count, there.pp)
    directory = GroupDirectory(memoryview(bytearray(shape.num_bytes)), shape)
    directory.begin(FORMATION, [1] * there.width)
    blocks = list(range(slots.count, shape.blocks))
    for place, rank in enumerate(ranks):
        member = Member(sizes, there, place, kv[rank], seed + place)
        directory.keep(rank, FORMATION, member.table.all_slots() if there.width > 1 else None)
        if there.width == 1:
            member.table.map(np.arange(PAGES), np.arange(PAGES))
        for block in blocks:
            member.put(block, content_of(sizes, block))
    draw = random.Random(seed)
    chosen = draw.sample(blocks, min(3, len(blocks)))
    count = sizes.slots(here).count
    into = draw.sample(range(count, PAGES * count), min(len(chosen), PAGES * count - count))
    for place in range(here.width):
        rank = Rank(place)
        own = {**kv, rank: kv[rank].copy() if rank in ranks else memory_of(sizes)}
        reader = Member(sizes, here, place, memory_of(sizes), seed + 99 - place)
        every = {**own, Rank(WORLD): reader.kv}
        copies = copies_of(kind, sizes, Rank(WORLD), every)
        lost = LostKV((directory,), Rank(WORLD), copies)
        step = BlockCopies(lost_blocks=into, lost_places=chosen[: len(into)])
        lost.loader(step, here, place, reader.table)()
        for block, source in zip(into, chosen, strict=False):
            assert reader.has(block, content_of(sizes, source)), (place, block, source)


# ------------------------------------------------------------------------------ host pages


@dataclass
class Group:
    """A group whose members each are at another step."""

    members: list[Member]
    copiers: list[tuple[PageCopier, PageCopier]]
    """Loads and stores of each."""
    jobs: list[deque[tuple[int, int, int, int]]]
    """(block, page, tag, key) that each member has still to fill and store, oldest first."""
    block: int = 0


@dataclass
class Reader:
    """A load that its members have not all made, of a pinned page."""

    rank: int
    group: Group
    page: int
    key: int
    block: int
    missing: list[int] = field(default_factory=list)


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


class Cell:
    """Groups of all splits over few host pages."""

    def __init__(self, sizes: PageGeometry, draw: random.Random) -> None:
        self.sizes, self.draw, self.now_s = sizes, draw, 0.0
        self.layout = HostLayout(2, draw.randint(1, 4), sizes.page_bytes)
        self.memory = memoryview(bytearray(self.layout.data_at))
        self.pages = np.zeros((self.layout.pages, sizes.page_bytes), np.uint8)
        self.directories = [self.open(rank) for rank in range(2)]
        self.groups = [self.group(split) for split in SPLITS]
        self.readers: list[Reader] = []
        self.read = 0

    def open(self, rank: int) -> HostDirectory:
        return HostDirectory(self.memory, self.layout, rank, self.now_s)

    def group(self, split: Split) -> Group:
        members, copiers = [], []
        for place in range(split.width):
            kv = torch.from_numpy(memory_of(self.sizes).reshape(-1).view(np.int8))
            member = Member(self.sizes, split, place, kv.numpy().view(np.uint8), place)
            members.append(member)
            at = self.pages.ctypes.data
            loads, stores = (PageCopier(at, kv, self.sizes, loads=each) for each in (True, False))
            copiers.append((loads, stores))
        return Group(members, copiers, [deque() for _ in members])

    def plan(self, rank: int, group: Group, keys: list[int]) -> None:
        """Let a step fill these blocks and store them; its members have it later."""
        own = self.directories[rank]
        own.refresh()
        new = [key for key in keys if not own.has(key_of(key))]
        shares = group.members[0].slots.count
        pages = own.allocate([key_of(key) for key in new], shares, self.now_s)
        for page, key, tag in zip(pages, new, own.entries.tags(pages), strict=False):
            group.block = group.block % (shares * PAGES - 1) + 1
            for jobs in group.jobs:
                jobs.append((group.block, page, tag, key))

    def compute(self, group: Group, place: int) -> None:
        """Let a member compute and store what its oldest step fills; it may end in between."""
        member, (_, stores) = group.members[place], group.copiers[place]
        block, page, tag, key = group.jobs[place].popleft()
        member.put(block, content_of(self.sizes, key))
        if not member.share.is_first or self.draw.random() < 0.03:
            return
        own = PageCopies(member.slots, member.share.number, member.table.slots([block]), [page])
        stores.launch(own)
        if self.draw.random() < 0.97:
            self.directories[place % 2].entries.complete([page], member.share.number, [tag])

    def pin(self, rank: int, group: Group, key: int) -> None:
        own = self.directories[rank]
        own.refresh()
        page = own.find(key_of(key))
        if page is not None and own.pin(page, key_of(key)):
            block = group.members[0].slots.count * PAGES - 1
            places = list(range(len(group.members)))
            self.draw.shuffle(places)
            self.readers.append(Reader(rank, group, page, key, block, places))

    def load(self, reader: Reader) -> None:
        """Let a member load the pinned pages; the last one unpins them."""
        place = reader.missing.pop()
        member, (loads, _) = reader.group.members[place], reader.group.copiers[place]
        numbers = member.table.slots([reader.block])
        loads.launch(PageCopies(member.slots, member.share.number, numbers, [reader.page]))
        assert member.has(reader.block, content_of(self.sizes, reader.key)), (place, reader)
        if not reader.missing:
            self.directories[reader.rank].unpin([reader.page])
            self.readers.remove(reader)
            self.read += 1


@settings(max_examples=60, deadline=None)
@given(sizes=st.sampled_from(GEOMETRIES), seed=st.integers(0, 2**32))
def test_host_pages_of_each_split_are_read_in_each_other_one(
    sizes: PageGeometry, seed: int
) -> None:
    """Members are at different steps, end, and leave torn pages; pages are few and evicted."""
    draw = random.Random(seed)
    cell = Cell(sizes, draw)
    for _ in range(STEPS):
        group, rank = draw.choice(cell.groups), draw.randrange(2)
        waiting = [(each, n) for each in cell.groups for n, jobs in enumerate(each.jobs) if jobs]
        match draw.randrange(8):
            case 0 | 1:
                cell.plan(rank, group, draw.sample(range(1, 7), draw.choice((1, 2))))
            case 2 | 3 | 4 if waiting:
                cell.compute(*draw.choice(waiting))
            case 5 if not any(each.group is group for each in cell.readers):
                cell.pin(rank, group, draw.randrange(1, 7))
            case 6 if cell.readers:
                cell.load(draw.choice(cell.readers))
            case 7 if draw.random() < 0.1:
                for jobs in group.jobs:
                    jobs.clear()  # A member is lost, and the group with it.
            case _ if not any(each for group in cell.groups for each in group.jobs):
                cell.now_s += WRITE_LIMIT_S + 1  # No member writes later than that.


@pytest.mark.parametrize("sizes", GEOMETRIES, ids=str)
def test_what_one_group_stores_all_others_load(sizes: PageGeometry) -> None:
    for number in range(len(SPLITS)):
        cell = Cell(sizes, random.Random(number))
        cell.draw.random = lambda: 0.5  # type: ignore[method-assign]
        writer = cell.groups[number]
        cell.plan(0, writer, [1])
        last = len(writer.members) - 1
        for place in range(last):
            cell.compute(writer, place)
        if any(member.share.is_first for member in writer.members[last:]):
            assert cell.directories[0].find(key_of(1)) is None, "a share of it is missing"
        cell.compute(writer, last)
        for group in cell.groups:
            cell.pin(1, group, 1)
            while cell.readers:
                cell.load(cell.readers[0])
        assert cell.read == len(SPLITS)

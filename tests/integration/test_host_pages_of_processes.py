"""Real processes over one directory of host pages: none ever reads a torn or another block."""

import mmap
import multiprocessing
import os
import random
import signal
import time
from typing import Any

import numpy as np

from kvadaptor.host import directory
from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout

PAGE_BYTES = 1 << 15
LAYOUT = HostLayout(ranks=3, pages_per_rank=16, page_bytes=PAGE_BYTES)
KEYS = 120
SHARES = 2
RUN_S = 1.0
LIVES = 4


def key_of(number: int) -> bytes:
    return bytes([number]) * 32


def pages_in(memory: mmap.mmap) -> Any:
    count = LAYOUT.pages * PAGE_BYTES
    pages = np.frombuffer(memory, np.uint8, count, LAYOUT.data_at)
    return pages.reshape(LAYOUT.pages, SHARES, -1)


def write(memory: mmap.mmap, rank: int, seed: int) -> None:
    """Store random blocks until the process is killed; 48 pages for 120 blocks evict often."""
    directory.AGE_MARGIN_S = 0.01
    pages, draw = pages_in(memory), random.Random(seed)
    own = HostDirectory(memoryview(memory), LAYOUT, rank, time.monotonic())
    while True:
        number = draw.randrange(1, KEYS)
        own.give(time.monotonic())
        if own.find(key_of(number)) is not None:
            continue
        found = own.allocate([key_of(number)], SHARES, time.monotonic())
        tags = own.entries.tags(found)
        for share in range(SHARES):
            pages[found, share] = number
            own.entries.complete(found, share, tags)


def read(memory: mmap.mmap, rank: int, seed: int, counts: Any) -> None:
    """Read random blocks and look at every byte."""
    pages, draw = pages_in(memory), random.Random(seed)
    own = HostDirectory(memoryview(memory), LAYOUT, rank, time.monotonic())
    until_s = time.monotonic() + RUN_S * LIVES
    while time.monotonic() < until_s:
        number = draw.randrange(1, KEYS)
        own.give(time.monotonic())
        page = own.find(key_of(number))
        if page is None or not own.pin(page, key_of(number)):
            counts[1] += 1
            continue
        for _ in range(2):
            if (pages[page] != number).any():
                counts[2] += 1
        own.unpin([page])
        counts[0] += 1


def test_no_reader_sees_a_torn_page() -> None:
    """Writers are killed at any instruction, also while they give pages to each other."""
    fork = multiprocessing.get_context("fork")
    memory = mmap.mmap(-1, LAYOUT.total_bytes)
    counts = fork.RawArray("q", 3)
    reader = fork.Process(target=read, args=(memory, 2, 1, counts), daemon=True)
    reader.start()
    for life in range(LIVES):
        writers = [
            fork.Process(target=write, args=(memory, rank, 10 * life + rank), daemon=True)
            for rank in range(2)
        ]
        for writer in writers:
            writer.start()
        time.sleep(RUN_S)
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
    reader.join(30)
    assert reader.exitcode == 0
    hits, misses, torn = counts
    print(f"{hits} reads, {misses} misses")
    assert torn == 0
    assert hits > 100
    owners = np.frombuffer(memory, np.uint8, LAYOUT.pages, LAYOUT.owners_at)
    assert np.count_nonzero(owners) > 0, "pages are given"
    last = [HostDirectory(memoryview(memory), LAYOUT, rank, 0.0) for rank in range(LAYOUT.ranks)]
    owned = sorted(page for each in last for page in each._own)
    assert owned == list(range(LAYOUT.pages)), "each page has one owner"

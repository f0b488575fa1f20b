"""Scans megabytes in pieces, so that a scanning thread does not block other threads.

Functions on bytes hold the interpreter's lock until they return: 5 to 8 ms for 8 MiB. The event
loop takes that lock several times per request. Longer data is scanned in pieces, with a short sleep
in between that releases the lock. Pure but for that sleep.
"""

import re
import time
from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 512 * 1024
"""Scanned without a break: less than half a millisecond."""
BREATH_S: Final = 50e-6
"""A thread that only yields takes the lock back before another one wakes up."""


def breathe(data: bytes) -> None:
    """Let other threads run, if scanning `data` takes long."""
    if len(data) > PIECE_BYTES:
        time.sleep(BREATH_S)


def count(data: bytes, byte: bytes) -> int:
    """Return how often one byte occurs."""
    return sum(data.count(byte, start, end) for start, end in _pieces(data))


def contains(data: bytes, mark: bytes) -> bool:
    """Return whether a mark of a few bytes occurs."""
    over = len(mark) - 1
    return any(data.find(mark, start, end + over) >= 0 for start, end in _pieces(data))


def matches(pattern: re.Pattern[bytes], data: bytes, longest: int) -> bool:
    """Return whether a pattern occurs that spans at most `longest` bytes."""
    for start, end in _pieces(data):
        found = pattern.search(data, start, end + longest)
        if found is not None and found.start() < end:
            return True
    return False


def _pieces(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each piece."""
    for start in range(0, len(data), PIECE_BYTES):
        if start:
            time.sleep(BREATH_S)
        yield start, min(start + PIECE_BYTES, len(data))

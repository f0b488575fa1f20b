"""Looks through megabytes in pieces, so that a thread that does it holds up no other.

Functions on bytes hold the interpreter's lock until they are done, 5 to 8 ms for 8 MiB, and the
event loop takes that lock several times per request. What is longer than a piece is looked through
piece by piece, with a breath between two in which the lock is free. Pure but for that time.
"""

import re
import time
from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 512 * 1024
"""What is looked through at once: less than half a millisecond."""
BREATH_S: Final = 50e-6
"""A thread that only yields takes the lock back before another is awake."""


def breathe(data: bytes) -> None:
    """Let other threads run, if this much data takes long at all."""
    if len(data) > PIECE_BYTES:
        time.sleep(BREATH_S)


def count(data: bytes, byte: bytes) -> int:
    """Return how often one byte occurs."""
    return sum(data.count(byte, start, end) for start, end in _pieces(data))


def contains(data: bytes, mark: bytes) -> bool:
    """Say whether a mark, a few bytes long, occurs."""
    over = len(mark) - 1
    return any(data.find(mark, start, end + over) >= 0 for start, end in _pieces(data))


def matches(pattern: re.Pattern[bytes], data: bytes, longest: int) -> bool:
    """Say whether a pattern matches that looks at so many bytes from its beginning at most."""
    for start, end in _pieces(data):
        found = pattern.search(data, start, end + longest)
        if found is not None and found.start() < end:
            return True
    return False


def _pieces(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where pieces begin and end."""
    for start in range(0, len(data), PIECE_BYTES):
        if start:
            time.sleep(BREATH_S)
        yield start, min(start + PIECE_BYTES, len(data))

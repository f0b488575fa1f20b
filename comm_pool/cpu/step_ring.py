"""The step queue of a group of CPU ranks: a ring in memory that outlives its members.

The leader writes, each follower reads everything, and a slot is free again when all have read it.
Members of vLLM's own queue, used on CUDA, make it together. Here a process that replaces a lost one
continues in its place: as the leader after what is written, as a follower with the next message.
"""

import mmap
import os
import pickle
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm_pool.cpu.cell_memory import FENCE

SLOTS = 6
SLOT_BYTES = 4 << 20
"""As in vLLM's queue. A slot takes memory for the longest message that it ever held."""

SHORT_NAPS_S = 0.002
"""How long a member sleeps briefly before it sleeps longer: ranks share cores."""

SHORT_NAP_S = 0.00002
"""A sleep instead of `sched_yield`: since Linux 6.18 each yield costs a whole time slice."""

LONG_NAP_S = 0.0003

_WRITTEN = 0
"""The word that counts messages; a follower's word counts those that it has read."""

_LENGTH_BYTES = 8
_ROOM = SLOT_BYTES - _LENGTH_BYTES


def ring_bytes(width: int) -> int:
    """Return the bytes of a ring of `width` members."""
    return _header_bytes(width) + SLOTS * SLOT_BYTES


class StepRing:
    """One member's end of the queue, with the methods of vLLM's `MessageQueue`; one thread."""

    def __init__(self, memory: mmap.mmap, place: int, width: int) -> None:
        """`memory` is of `ring_bytes`; this is member `place` of `width`, the leader is 0."""
        self._memory = memory
        self._place = place
        self._words = memoryview(memory).cast("q")[:width]
        self._start = _header_bytes(width)
        self._long: dict[int, int] = {}
        """Slot -> the file with its message, which is too long for the slot."""
        if place:
            self._words[place] = self._words[_WRITTEN]

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send to all followers; `TimeoutError` if there is no room within `timeout` seconds."""
        message = pickle.dumps(obj, protocol=5)
        words = self._words
        _wait(lambda: words[_WRITTEN] - min(words[1:]) < SLOTS, timeout)
        slot = words[_WRITTEN] % SLOTS
        if (read := self._long.pop(slot, None)) is not None:
            os.close(read)
        if len(message) > _ROOM:
            name = f"aileron-step-{secrets.token_hex(8)}"
            self._long[slot] = file = os.memfd_create(name, os.MFD_CLOEXEC)
            with os.fdopen(file, "wb", closefd=False) as written:
                written.write(message)
            self._put(slot, -1, f"/proc/{os.getpid()}/fd/{file} {name}".encode())
        else:
            self._put(slot, 1, message)
        with FENCE:
            words[_WRITTEN] += 1

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the next message; `TimeoutError` if none comes within `timeout` seconds."""
        words, place = self._words, self._place
        _wait(lambda: words[place] < words[_WRITTEN], timeout)
        start = self._start + words[place] % SLOTS * SLOT_BYTES
        length = self._length(start)
        at = start + _LENGTH_BYTES
        content = self._memory[at : at + abs(length)]
        message = content if length > 0 else _read(*content.decode().split())
        with FENCE:
            words[place] += 1
        if message is None:
            raise TimeoutError
        return pickle.loads(message)  # noqa: S301 -- our own ranks' memory

    def _put(self, slot: int, sign: int, message: bytes) -> None:
        start = self._start + slot * SLOT_BYTES
        at = start + _LENGTH_BYTES
        self._memory[at : at + len(message)] = message
        length = sign * len(message)
        self._memory[start:at] = length.to_bytes(_LENGTH_BYTES, "little", signed=True)

    def _length(self, start: int) -> int:
        encoded = self._memory[start : start + _LENGTH_BYTES]
        return int.from_bytes(encoded, "little", signed=True)


def _read(path: str, name: str) -> bytes | None:
    """Return a long message; None if its leader has ended, which voids the message."""
    try:
        with Path(path).open("rb") as file:
            # The leader's pid may belong to another process by now.
            is_it = name in str(Path(f"/proc/self/fd/{file.fileno()}").readlink())
            return file.read() if is_it else None
    except OSError:
        return None


def _wait(is_so: Callable[[], bool], timeout: float | None) -> None:
    started = time.monotonic()
    while not is_so():
        waited = time.monotonic() - started
        if timeout is not None and waited >= timeout:
            raise TimeoutError
        time.sleep(SHORT_NAP_S if waited < SHORT_NAPS_S else LONG_NAP_S)


def _header_bytes(width: int) -> int:
    """Return the bytes of the words, rounded up to whole memory pages."""
    return -(-width * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

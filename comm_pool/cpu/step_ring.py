"""The step queue of a group of CPU ranks: a ring in memory that outlives its members.

Its leader writes, each follower reads all that is written, and a slot is free again when all have
read it. vLLM's own queue, which is used on CUDA, is made by its members together; here a process
that takes the place of a lost one goes on where that was: as the leader behind what is written, as
a follower with what is written from now on.
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
"""As in vLLM's queue. A slot takes memory for the longest message that was ever in it."""

SHORT_NAPS_S = 0.002
"""How long a member takes short naps, before it takes long ones: ranks share cores."""

SHORT_NAP_S = 0.00002
"""A nap is no `sched_yield`: since Linux 6.18 each yield costs its caller a whole time slice."""

LONG_NAP_S = 0.0003

_WRITTEN = 0
"""The word that counts messages; that at a follower's place counts those that it has read."""

_LENGTH_BYTES = 8
_ROOM = SLOT_BYTES - _LENGTH_BYTES


def ring_bytes(width: int) -> int:
    """Memory of a ring of so many members."""
    return _header_bytes(width) + SLOTS * SLOT_BYTES


class StepRing:
    """One member's end of the queue, with the words of vLLM's `MessageQueue`; one thread's."""

    def __init__(self, memory: mmap.mmap, place: int, width: int) -> None:
        """`memory` is of `ring_bytes`; this is member `place` of `width`, the leader is 0."""
        self._memory = memory
        self._place = place
        self._words = memoryview(memory).cast("q")[:width]
        self._start = _header_bytes(width)
        self._long: dict[int, int] = {}
        """Slot -> the file with its message, which is too long for it."""
        if place:
            self._words[place] = self._words[_WRITTEN]

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Tell all followers; `TimeoutError` if there is no room within so many seconds."""
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
        """Return the next message; `TimeoutError` if none comes within so many seconds."""
        words, place = self._words, self._place
        _wait(lambda: words[place] < words[_WRITTEN], timeout)
        start = self._start + words[place] % SLOTS * SLOT_BYTES
        length = self._length(start)
        at = start + _LENGTH_BYTES
        told = self._memory[at : at + abs(length)]
        message = told if length > 0 else _read(*told.decode().split())
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
        told = self._memory[start : start + _LENGTH_BYTES]
        return int.from_bytes(told, "little", signed=True)


def _read(path: str, name: str) -> bytes | None:
    """A long message; None if its leader has ended, so that nothing of it counts any more."""
    try:
        with Path(path).open("rb") as file:
            # The leader's number may be another process' by now.
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
    """Room for the words, up to where a page of memory begins."""
    return -(-width * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

"""Locks that ranks hold while they live, so that their ends are seen before they are over.

A parent learns of a child's end once the kernel has given back all that it had. For a rank with
many GB of device and pinned memory that takes more than a second. A robust mutex is marked at the
very beginning of its owner's end, however that comes (`man set_robust_list`).
"""

import ctypes
import errno
import mmap
import os
import struct

from comm_pool.layout import Rank

_SLOT_BYTES = 128
"""More than a mutex takes, so that two share no cache line."""
_OWNER_DIED = 0x4000_0000
"""The kernel sets this bit of a mutex's first word (FUTEX_OWNER_DIED)."""
_WORD = struct.Struct("I")
_ATTRIBUTE_BYTES = 64
_SHARED, _ROBUST = 1, 1
"""PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST."""


class LifeLocks:
    """One lock per rank, in memory shared with processes forked after it was made."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * _SLOT_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._library = ctypes.CDLL(None, use_errno=False)

    def renew(self, rank: Rank) -> None:
        """Make the lock for the next process of the rank; the one before has ended."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        self._call("pthread_mutexattr_init", attributes)
        self._call("pthread_mutexattr_setpshared", attributes, _SHARED)
        self._call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        start = rank * _SLOT_BYTES
        self._memory[start : start + _SLOT_BYTES] = bytes(_SLOT_BYTES)
        self._call("pthread_mutex_init", self._lock_of(rank), attributes)

    def hold(self, rank: Rank) -> None:
        """Hold the lock for as long as the calling thread lives, the main one of the rank."""
        self._call("pthread_mutex_lock", self._lock_of(rank))

    def release(self, rank: Rank) -> None:
        """Release the lock: the process is about to end as it was asked to."""
        self._call("pthread_mutex_unlock", self._lock_of(rank))

    def is_ending(self, rank: Rank) -> bool:
        """Return whether the newest process of the rank has begun to end with its lock held."""
        (word,) = _WORD.unpack_from(self._memory, rank * _SLOT_BYTES)
        return bool(word & _OWNER_DIED)

    def _lock_of(self, rank: Rank) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + rank * _SLOT_BYTES)

    def _call(self, name: str, *arguments: object) -> None:
        error: int = getattr(self._library, name)(*arguments)
        if error:
            raise OSError(
                error, f"{name}: {errno.errorcode.get(error, error)}, {os.strerror(error)}"
            )

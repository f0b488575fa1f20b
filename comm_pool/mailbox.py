"""What ranks of a host tell each other during a move: one board of shared memory per rank.

A rank writes on its own board and reads those of its peers; nothing here waits or blocks, so a
rank that is told to do something else simply stops looking. Invariant: the epoch is written last,
so whoever reads an epoch finds all that belongs to it. A rank writes twice for an epoch: what it
has, and, when its last step is over (*settled*), what that has brought.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("/dev/shm")  # noqa: S108 -- where POSIX shared memory has its names

MAILBOX_BYTES = 256 << 20
"""Room for what one rank tells in one move; memory is only taken for what is written."""

_EPOCH, _LENGTH, _ROUND, _SETTLED, _SETTLED_LENGTH, _ENDS = range(6)
"""Words of the header: `_ROUND` is that which the rank has finished (-1: it gave up), `_SETTLED`
the epoch of the second message, which stands behind the first, `_ENDS` when the owner's last step
is expected to end."""

SETTLED_SHARE = 64
"""1/64 of the board is kept for the second message, some 100 bytes for each task of the first."""

_DATA_START = 64
GAVE_UP = -1


class MailboxFullError(ValueError):
    """A message is longer than the board."""


class RankMailbox:
    """One rank's board, as its owner or as a reader."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        # A word is read and written at once; `struct` would do it byte by byte.
        self._words = memoryview(memory).cast("q")

    def publish(self, epoch: int, message: bytes) -> None:
        """Replace what stands here; readers of `epoch` find it from now on."""
        room = len(self._memory) - len(self._memory) // SETTLED_SHARE - _DATA_START
        if len(message) > room:
            raise MailboxFullError(f"a message of {len(message)} bytes is too long for the board.")
        self._words[_EPOCH] = self._words[_SETTLED] = 0
        self._memory[_DATA_START : _DATA_START + len(message)] = message
        self._words[_LENGTH], self._words[_ROUND] = len(message), 0
        self._words[_EPOCH] = epoch

    @property
    def epoch(self) -> int:
        """The epoch that the message belongs to; 0 is none."""
        return self._words[_EPOCH]

    @property
    def message(self) -> bytes:
        """What stands here."""
        length = self._words[_LENGTH]
        return self._memory[_DATA_START : _DATA_START + length]

    def settle(self, message: bytes) -> None:
        """Add what the last step has brought; readers of the epoch find it from now on."""
        start = _DATA_START + self._words[_LENGTH]
        if start + len(message) > len(self._memory):
            raise MailboxFullError(f"{len(message)} bytes more are too many for the board.")
        self._memory[start : start + len(message)] = message
        self._words[_SETTLED_LENGTH] = len(message)
        self._words[_SETTLED] = self._words[_EPOCH]

    @property
    def is_settled(self) -> bool:
        """The owner's device has done all that it was to do before the move of `epoch`."""
        return self._words[_SETTLED] == self._words[_EPOCH]

    @property
    def settled_message(self) -> bytes:
        """What the last step has brought."""
        start = _DATA_START + self._words[_LENGTH]
        return self._memory[start : start + self._words[_SETTLED_LENGTH]]

    @property
    def ends_ns(self) -> int:
        """When the owner expects the last step to end that it leads, on the host's monotonic clock.

        0 is unknown; a time that has passed says nothing.
        """
        return self._words[_ENDS]

    def expect_end(self, at_ns: int) -> None:
        """Tell it, in every epoch."""
        self._words[_ENDS] = at_ns

    @property
    def round(self) -> int:
        """How far the owner is in the move of `epoch`; `GAVE_UP` if it left it."""
        return self._words[_ROUND]

    def finish_round(self, number: int) -> None:
        """Say that the owner has carried out this round, or has given up."""
        self._words[_ROUND] = number


def open_boards(rank: int, gather: Callable[[Any], Sequence[Any]]) -> tuple[RankMailbox, ...]:
    """Make this rank's board and map those of all ranks; a collective call.

    `gather` returns what every rank gave it, in order of the ranks. Names are gone when it
    returns, so that nothing is left behind however a process ends.
    """
    own = FOLDER / f"aileron-board-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, MAILBOX_BYTES)
        memory = mmap.mmap(descriptor, MAILBOX_BYTES)
        names = gather(str(own))
        mailboxes = [memory if number == rank else _map(name) for number, name in enumerate(names)]
        gather(None)
    finally:
        os.close(descriptor)
        own.unlink()
    return tuple(RankMailbox(mailbox) for mailbox in mailboxes)


def _map(name: str) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, MAILBOX_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)

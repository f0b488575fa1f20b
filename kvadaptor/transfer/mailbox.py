"""Mailboxes through which the ranks of a host coordinate a migration: one per rank.

A rank writes its own mailbox in shared memory and reads those of its peers. Nothing here blocks, so
a rank with a new directive simply stops polling. Invariant: the epoch is written last, so a reader
that sees an epoch finds all that belongs to it. A rank writes twice per epoch: its manifest, and,
once its device is quiesced (*settled*), the tokens of its last step.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("/dev/shm")  # noqa: S108 -- where POSIX shared memory has its names

MAILBOX_BYTES = 256 << 20
"""Maximum size of one rank's messages in one migration; only written pages take memory."""

_EPOCH, _LENGTH, _ROUND, _SETTLED, _SETTLED_LENGTH, _ENDS = range(6)
"""Words of the header.

`_ROUND` is the round that the rank has finished (-1: it gave up), `_SETTLED` the epoch of the
second message, which follows the first, `_ENDS` when the owner's last step is expected to end.
"""

SETTLED_SHARE = 64
"""1/64 of the mailbox is reserved for the second message, about 100 bytes per task."""

_DATA_START = 64
GAVE_UP = -1


class MailboxFullError(ValueError):
    """A message is longer than the room in the mailbox."""


class RankMailbox:
    """One rank's mailbox, for its owner or for a reader."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        # A word is read and written atomically; `struct` would go byte by byte.
        self._words = memoryview(memory).cast("q")

    def publish(self, epoch: int, message: bytes) -> None:
        """Replace the message; readers of `epoch` find it from now on."""
        room = len(self._memory) - len(self._memory) // SETTLED_SHARE - _DATA_START
        if len(message) > room:
            raise MailboxFullError(
                f"a message of {len(message)} bytes does not fit into the {room} of a mailbox."
            )
        self._words[_EPOCH] = self._words[_SETTLED] = 0
        self._memory[_DATA_START : _DATA_START + len(message)] = message
        self._words[_LENGTH], self._words[_ROUND] = len(message), 0
        self._words[_EPOCH] = epoch

    @property
    def epoch(self) -> int:
        """The epoch of the message; 0 is none."""
        return self._words[_EPOCH]

    @property
    def message(self) -> bytes:
        """The current message."""
        length = self._words[_LENGTH]
        return self._memory[_DATA_START : _DATA_START + length]

    def settle(self, message: bytes) -> None:
        """Add the tokens of the last step; readers of the epoch find them from now on."""
        start = _DATA_START + self._words[_LENGTH]
        if start + len(message) > len(self._memory):
            raise MailboxFullError(f"{len(message)} more bytes do not fit into the mailbox.")
        self._memory[start : start + len(message)] = message
        self._words[_SETTLED_LENGTH] = len(message)
        self._words[_SETTLED] = self._words[_EPOCH]

    @property
    def is_settled(self) -> bool:
        """Whether the owner's device is quiesced for the migration of `epoch`."""
        return self._words[_SETTLED] == self._words[_EPOCH]

    @property
    def settled_message(self) -> bytes:
        """The tokens of the last step."""
        start = _DATA_START + self._words[_LENGTH]
        return self._memory[start : start + self._words[_SETTLED_LENGTH]]

    @property
    def ends_ns(self) -> int:
        """When the owner expects the last step that it leads to end, on the host's monotonic clock.

        0 is unknown; a time in the past carries no information.
        """
        return self._words[_ENDS]

    def expect_end(self, at_ns: int) -> None:
        """Publish the expected end of the last step; independent of the epoch."""
        self._words[_ENDS] = at_ns

    @property
    def round(self) -> int:
        """The owner's progress in the migration of `epoch`; `GAVE_UP` if it abandoned it."""
        return self._words[_ROUND]

    def finish_round(self, number: int) -> None:
        """Publish that the owner has finished this round, or has given up."""
        self._words[_ROUND] = number


def open_mailboxes(rank: int, gather: Callable[[Any], Sequence[Any]]) -> tuple[RankMailbox, ...]:
    """Make this rank's mailbox and map those of all ranks; a collective call.

    `gather` returns the argument of every rank, in order of the ranks. The names are unlinked when
    it returns, so nothing remains however a process ends.
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

"""What outlives the CUDA ranks of a cell: handles of their device memory, and what says what it is.

A rank's device memory ends with the last handle and the last mapping of it. The launcher touches no
device. It makes this before it forks the ranks and keeps it, so it holds a handle of each: a
peer maps the memory of a rank that has ended, and the next process of a rank finds it there.
"""

import array
import os
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from comm_pool.cpu.cell_memory import (
    CellMemory,
    directory_names,
    kv_name,
    manifest_name,
    measurements_name,
    rest_name,
)
from comm_pool.mixed import Staged
from comm_pool.plan import communicator_plan

FILES_MAX = 253
"""File handles of one piece of memory; a message passes no more (SCM_MAX_FD)."""

CONTENT_BYTES_MAX = 1 << 16


class MemoryHandles:
    """File handles by name, for the process that makes it and its forked children.

    Those of a name wait in a socket that only they use. Readers look at the message and leave it
    there, so it holds the handles for as long as any process has the socket.
    """

    def __init__(self, names: Collection[str]) -> None:
        pairs = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for name in names}
        self._sockets = pairs

    def put(self, name: str, content: bytes, files: Sequence[int]) -> None:
        """Replace what a name stands for; only the rank that the memory belongs to calls it.

        `files` stay open in this process, too.
        """
        if len(files) > FILES_MAX or len(content) > CONTENT_BYTES_MAX:
            raise ValueError(
                f"{name} has {len(files)} handles and {len(content)} bytes: at most {FILES_MAX} "
                f"and {CONTENT_BYTES_MAX} fit."
            )
        self.drop(name)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        self._sockets[name][0].sendmsg([content], [rights] if files else [])

    def get(self, name: str) -> tuple[bytes, list[int]] | None:
        """Return the content and new file handles, which the caller closes; or None."""
        return self._receive(name, socket.MSG_PEEK)

    def drop(self, name: str) -> None:
        """Let go of what a name stands for: the memory ends with the last process that maps it."""
        while (found := self._receive(name, 0)) is not None:
            for file in found[1]:
                os.close(file)

    def _receive(self, name: str, flags: int) -> tuple[bytes, list[int]] | None:
        files = array.array("i")
        room = socket.CMSG_SPACE(FILES_MAX * files.itemsize)
        flags |= socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            content, ancillary, found, _ = self._sockets[name][1].recvmsg(
                CONTENT_BYTES_MAX, room, flags
            )
        except BlockingIOError:
            return None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        if found & socket.MSG_CTRUNC:
            for file in files:
                os.close(file)
            raise OSError(f"this process may not open all file handles of {name}: raise its limit.")
        return content, files.tolist()

    def close(self) -> None:
        """Close them in this process; what it has mapped stays mapped."""
        while self._sockets:
            for each in self._sockets.popitem()[1]:
                with suppress(OSError):
                    each.close()


@dataclass(frozen=True, slots=True)
class LastingMemory:
    """What the launcher keeps for CUDA ranks."""

    handles: MemoryHandles
    """The KV memory of each rank, by `kv_name`, and its weights, by `rest_name`."""
    cell: CellMemory
    """The block directories of all groups, and for each rank the list of its weights and what it
    measured at start-up."""
    splits: tuple[tuple[int, int], ...] = ()
    """The pipeline stages, and the parts of each, of all groups that there may be."""

    def close(self) -> None:
        """Close it in this process."""
        self.handles.close()
        self.cell.close()


def lasting_memory(
    world: int, widths: Collection[int], pipelines: Collection[Staged]
) -> LastingMemory:
    """Make what outlives the ranks of a cell, with all groups that they may form."""
    plain = {(1, len(ranks)) for ranks in communicator_plan(world, widths)}
    splits = {(1, 1), *plain, *((each.pp, each.tp) for each in pipelines)}
    handles = MemoryHandles([name(rank) for name in (kv_name, rest_name) for rank in range(world)])
    of_ranks = [name(rank) for name in (manifest_name, measurements_name) for rank in range(world)]
    cell = CellMemory([*directory_names(world, widths, pipelines), *of_ranks])
    return LastingMemory(handles, cell, tuple(sorted(splits)))

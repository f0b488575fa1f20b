"""Memory that the CPU ranks of a cell share: planes, queues, mailboxes, KV, directories, weights.

The launcher makes it before it forks the ranks, and keeps it, so it outlives each of them: a
restarted rank finds the memory of its predecessor, and living ranks have it mapped already. It
consists of anonymous files (`memfd`) without a name, so nothing remains however a process ends, and
it takes no space until it is written.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Collection, Iterator, Sequence

from comm_pool.layout import Rank, lease_key
from comm_pool.mixed import Mixed, Staged, reducing_groups
from comm_pool.plan import communicator_plan

FENCE = threading.Lock()
"""Taking a lock orders memory on processors with weak ordering; vLLM does the same."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Shrinking a file would kill its readers."""


class CellMemoryError(ValueError):
    """Two processes want different sizes of the same memory; the message is one sentence."""


class CellMemory:
    """Pieces of memory by name, for the process that makes it and its forked children."""

    def __init__(self, names: Collection[str]) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._files = {name: os.memfd_create(f"aileron-{name}", flags) for name in names}

    def map(self, name: str, num_bytes: int, *, is_own: bool = True) -> mmap.mmap:
        """Map a piece; the first caller sets its size. Pieces of others are read-only."""
        file = self._files[name]
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, num_bytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        elif (length := os.fstat(file).st_size) != num_bytes:
            raise CellMemoryError(f"{name} has {length} bytes for some rank, {num_bytes} here.")
        access = mmap.PROT_READ | mmap.PROT_WRITE if is_own else mmap.PROT_READ
        return mmap.mmap(file, num_bytes, mmap.MAP_SHARED, access)

    def put(self, name: str, content: bytes) -> None:
        """Replace a piece that is read as a whole."""
        os.ftruncate(self._files[name], 0)
        os.pwrite(self._files[name], content, 0)

    def get(self, name: str) -> bytes:
        """Return the bytes that were last `put`."""
        file = self._files[name]
        return os.pread(file, os.fstat(file).st_size, 0)

    def close(self) -> None:
        """Close it in this process; mapped pieces stay mapped."""
        while self._files:
            os.close(self._files.popitem()[1])


def clear(memory: mmap.mmap, first: int = 0, last: int | None = None) -> None:
    """Zero a mapped piece for all processes that map it, and free its pages.

    Or only its bytes from `first` to before `last`.
    """
    last = len(memory) if last is None else last
    size = mmap.PAGESIZE
    begin, end = -(-first // size) * size, last // size * size
    if begin >= end:
        memory[first:last] = bytes(last - first)
        return
    memory.madvise(mmap.MADV_REMOVE, begin, end - begin)
    memory[first:begin] = bytes(begin - first)
    memory[end:last] = bytes(last - end)


def plane_name(ranks: Sequence[int]) -> str:
    """Name the memory of the plane of these ranks."""
    return "-".join(("plane", *map(str, ranks)))


def queue_name(ranks: Sequence[int]) -> str:
    """Name the memory of the step queue of these ranks."""
    return "-".join(("queue", *map(str, ranks)))


def link_name(ranks: Sequence[int], staged: Staged, stage: int, part: int = 0) -> str:
    """Name the memory of the link from a pipeline stage of these ranks to the next one.

    Members with the same part of the weights are linked.
    """
    return "-".join(("link", *map(str, ranks), str(staged), f"from{stage}", f"part{part}"))


def mailbox_name(rank: int) -> str:
    """Name the memory of a rank's mailbox."""
    return f"board-{rank}"


def kv_name(rank: int) -> str:
    """Name a rank's KV memory."""
    return f"kv-{rank}"


def directory_name(ranks: Sequence[int]) -> str:
    """Name the memory of the block directory of a group whose lease has this key."""
    return "-".join(("directory", *map(str, ranks)))


def weights_name(rank: int) -> str:
    """Name the memory of a rank's part of the weights."""
    return f"weights-{rank}"


def rest_name(rank: int) -> str:
    """Name the memory of what a rank has loaded besides the weights that its peers read."""
    return f"rest-{rank}"


def manifest_name(rank: int) -> str:
    """Name the list of all tensors in a rank's two pieces of weights."""
    return f"manifest-{rank}"


def measurements_name(rank: int) -> str:
    """Name the start-up measurements of a rank."""
    return f"measured-{rank}"


def host_kv_name() -> str:
    """Name the memory of the cell's host pages, which is a `CellMemory` of its own."""
    return "host-kv"


def cell_memory(
    world: int,
    widths: Collection[int],
    mixed: Collection[Mixed],
    pipelines: Collection[Staged] = (),
) -> CellMemory:
    """Make the memory of a cell of `world` ranks, with all groups that they may form."""
    aligned = communicator_plan(world, widths)
    strided = [ranks for lists in reducing_groups(world, mixed).values() for ranks in lists]
    of_rank = (
        mailbox_name,
        kv_name,
        weights_name,
        rest_name,
        manifest_name,
        measurements_name,
    )
    of_ranks = (name(rank) for name in of_rank for rank in range(world))
    directories = directory_names(world, widths, pipelines)
    planes = (plane_name(ranks) for ranks in (*aligned, *strided))
    queues = (queue_name(ranks) for ranks in aligned)
    links = link_names(world, widths, pipelines)
    return CellMemory((*of_ranks, *directories, *planes, *queues, *links))


def directory_names(
    world: int, widths: Collection[int], pipelines: Collection[Staged]
) -> tuple[str, ...]:
    """Name the memory of the block directories of all groups."""
    aligned = communicator_plan(world, widths)
    alone = ((rank,) for rank in range(world))
    keys = (lease_key(ranks, each.pp) for ranks, each in _staged(aligned, pipelines))
    return tuple(directory_name(key) for key in (*alone, *aligned, *keys))


def link_names(
    world: int, widths: Collection[int], pipelines: Collection[Staged]
) -> tuple[str, ...]:
    """Name the memory of all links between the stages of pipeline groups.

    That after the last stage leads back to the first one.
    """
    return tuple(
        link_name(ranks, each, stage, part)
        for ranks, each in _staged(communicator_plan(world, widths), pipelines)
        for stage in range(each.pp)
        for part in range(each.tp)
    )


def _staged(
    aligned: Sequence[tuple[Rank, ...]], pipelines: Collection[Staged]
) -> Iterator[tuple[tuple[Rank, ...], Staged]]:
    """Yield the ranks of each pipeline group that these aligned ranks may form."""
    for each in set(pipelines):
        yield from ((ranks, each) for ranks in aligned if len(ranks) == each.width)

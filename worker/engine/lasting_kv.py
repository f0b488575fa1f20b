"""A CUDA rank's KV memory, which outlives its process, and its access to that of the others.

The launcher holds handles of it (comm_pool/cuda/lasting_memory.py). So the tasks of a lost rank go
on elsewhere from its own pages, as they do on CPU. The next process of the rank takes its memory
over, with the blocks that are still true. Where devices have no such memory, a rank's KV ends with
its process.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
import torch.distributed as dist

from comm_pool.cpu.cell_memory import CellMemoryError, kv_name
from comm_pool.cuda.lasting_memory import LastingMemory
from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.transfer.device_memory import allocate_lasting, map_lasting
from kvadaptor.transfer.movers import PeerMover
from kvadaptor.transfer.peers import (
    PeerMap,
    PeerMappingError,
    allocate,
    attempt,
    gather_all,
    map_peers,
    refusal_of,
)
from kvadaptor.views import zero_pages
from worker.engine.lost_copies import MoverPageCopies
from worker.engine.lost_kv import LostKV, inherited_pages, open_directories

log = structlog.get_logger()

Allocate = Callable[[int, torch.device], tuple[torch.Tensor, int]]
Map = Callable[[int, int, torch.device], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MemoryCalls:
    """How memory that lasts is made and mapped; see `device_memory`."""

    allocate: Allocate = allocate_lasting
    map: Map = map_lasting


@dataclass(slots=True)
class LastingKV:
    """The KV memory of one rank of `ranks`."""

    lasting: LastingMemory
    rank: Rank
    ranks: int
    geometry: PageGeometry
    device: torch.device
    cpu_group: Any
    """The Gloo group of the ranks that start together."""
    calls: MemoryCalls = field(default_factory=MemoryCalls)
    is_trusted: bool = True
    """Whether what the predecessor left may be read."""
    _memory: dict[int, torch.Tensor] = field(default_factory=dict)
    """What is mapped, by rank."""
    _directories: tuple[GroupDirectory, ...] = ()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the rank's own memory, (num_bytes,) int8: zeros, and inherited pages.

        A collective of the ranks that start together. Raises `CellMemoryError` if the predecessor
        had memory of another size, which others map, if it cannot be taken over, or if only some
        ranks can have memory that lasts.
        """
        known = lasting_bytes(self.lasting, self.rank)
        if known and known != num_bytes:
            raise CellMemoryError(
                f"rank {self.rank} had {known} bytes of KV memory, and would have {num_bytes} now: "
                "restart all ranks (`aileron renew`)."
            )
        found = attempt(lambda: self._take_over() if known else self._make(num_bytes))
        reason = found if isinstance(found, PeerMappingError) else None
        reasons = gather_all(reason, self.cpu_group)
        if isinstance(found, torch.Tensor) and not any(reasons.values()):
            return found
        if known or not all(reasons.values()):
            # Others may have mapped what a rank had, and would read that.
            raise CellMemoryError(
                f"not all KV memory outlives its process ({refusal_of(reasons)}): restart all "
                "ranks (`aileron renew`)."
            )
        self.lasting.handles.put(kv_name(self.rank), b"0", [])
        advice = "the tasks of a lost rank are computed again"
        log.warning("kv_ends_with_its_process", reason=str(reason), advice=advice)
        return allocate(num_bytes, self.device)

    def _make(self, num_bytes: int) -> torch.Tensor:
        """Make memory for the rank's first process."""
        if lasting_bytes(self.lasting, self.rank) is not None:
            raise PeerMappingError("the processes before this one have had none.")
        own, file = self.calls.allocate(num_bytes, self.device)
        self.lasting.handles.put(kv_name(self.rank), str(num_bytes).encode(), [file])
        os.close(file)
        self._memory[self.rank] = own
        return own

    def _take_over(self) -> torch.Tensor:
        """Return the memory of the predecessor; others may read it until this is called."""
        own = self._map(self.rank)
        self._open_directories()
        zero_pages(own, self.geometry, inherited_pages(self._directories, self.rank))
        if own.is_cuda:
            torch.cuda.synchronize(own.device)
        return own

    def map_all(self, raw: torch.Tensor, cpu_group: Any) -> PeerMap:
        """Map the memory of the ranks that start together; see `map_peers`, also a collective."""
        if self.rank not in self._memory:
            return map_peers(raw, cpu_group)
        place, world = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
        first = self.rank - place
        refusal = self._map_together(range(first, first + world))
        if refusal is not None:
            return PeerMap({}, refusal)
        return PeerMap({each: self._memory[first + each] for each in range(world)}, None)

    def open_lost(self) -> LostKV | None:
        """Return the rank's access to the KV of lost groups; None if it ends with processes.

        A collective of the ranks that start together, once they have their memory.
        """
        if self.rank not in self._memory or self._map_together(range(self.ranks)) is not None:
            return None
        self._open_directories()
        mover = PeerMover(self.rank, self._memory, self.geometry)
        for width in {split.tp for split in self._splits}:
            mover.warm(width)
        copies = MoverPageCopies(self.geometry, self.rank, mover)
        return LostKV(self._directories, self.rank, copies)

    def _map_together(self, ranks: Iterable[int]) -> str | None:
        """Map these ranks' memory on all that start together; return why some cannot, if so."""

        def map_each() -> None:
            for each in ranks:
                self._map(Rank(each))

        return refusal_of(gather_all(attempt(map_each), self.cpu_group))

    @property
    def _splits(self) -> list[Split]:
        """The splits of groups whose members all have other shares than each other."""
        splits = (Split(pp, tp) for pp, tp in self.lasting.splits)
        return [each for each in splits if self.geometry.slots(each).count == each.width]

    def _open_directories(self) -> None:
        """Map the directories, of one size on all ranks, and give up what a predecessor had."""
        if self._directories:
            return
        most = max(lasting_bytes(self.lasting, Rank(each)) or 0 for each in range(self.ranks))
        pages, of_cell = most // self.geometry.page_bytes, (self.rank, self.ranks)
        of_pages = self.lasting.cell, *of_cell, pages, self.geometry, self._splits
        self._directories = open_directories(*of_pages, is_trusted=self.is_trusted)

    def _map(self, rank: Rank) -> torch.Tensor:
        """Map a rank's memory, once; raises `PeerMappingError`."""
        if rank in self._memory:
            return self._memory[rank]
        found = self.lasting.handles.get(kv_name(rank))
        if found is None or not found[1]:
            raise PeerMappingError(f"rank {rank} has no memory that outlives its process.")
        content, (file,) = found
        self._memory[rank] = self.calls.map(file, int(content), self.device)
        return self._memory[rank]


def lasting_bytes(lasting: LastingMemory | None, rank: Rank) -> int | None:
    """Return the size of the KV memory that a rank's predecessor has left; None: there was none.

    0: its memory ended with it. What is left counts as in use, so there is nothing to measure.
    """
    found = lasting.handles.get(kv_name(rank)) if lasting is not None else None
    if found is None:
        return None
    for file in found[1]:
        os.close(file)
    return int(found[0])

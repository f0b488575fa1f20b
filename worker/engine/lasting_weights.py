"""A CUDA rank's weights, in memory that outlives its process: the next one reads no checkpoint.

The launcher holds handles of the memory (comm_pool/cuda/lasting_memory.py). It is made and filled
piece by piece, and what it replaces is freed meanwhile, so a device needs no room for two copies.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from comm_pool.cpu.cell_memory import manifest_name, rest_name
from comm_pool.cuda.lasting_memory import LastingMemory
from comm_pool.layout import Rank
from kvadaptor.transfer.device_memory import LastingArea
from kvadaptor.transfer.peers import PeerMappingError
from worker.engine.lasting_kv import lasting_bytes
from worker.engine.weights.manifest import PartManifest
from worker.engine.weights.part_store import RestMemory

PIECE_BYTES_MIN, PIECES_MAX = 1 << 30, 32
"""Each piece has a file handle, and a user's processes may have few of them in sockets."""

MakeArea = Callable[[int, torch.device], LastingArea]


def new_area(num_bytes: int, device: torch.device) -> LastingArea:
    """Reserve addresses for weights."""
    piece_bytes = max(PIECE_BYTES_MIN, -(-num_bytes // PIECES_MAX))
    return LastingArea(num_bytes, device, piece_bytes=piece_bytes)


@dataclass(frozen=True, slots=True)
class LastingWeights:
    """The memory of one rank's weights."""

    lasting: LastingMemory
    rank: Rank
    device: torch.device
    make_area: MakeArea = field(default=new_area)
    _mapped: list[LastingArea] = field(default_factory=list)
    """What a predecessor has left, where this process uses it."""

    def make(self, num_bytes: int) -> RestMemory:
        """Make memory for weights; raises `PeerMappingError` if the device has none such."""
        area = self.make_area(num_bytes, self.device)

        def keep() -> None:
            name, size = rest_name(self.rank), str(num_bytes).encode()
            try:
                self.lasting.handles.put(name, size, area.files)
            finally:
                for file in area.files:
                    os.close(file)

        return RestMemory(area.raw, area.grow, keep)

    def map(self, num_bytes: int) -> torch.Tensor:
        """Map the memory of the predecessor; raises `PeerMappingError`."""
        content, files = self.lasting.handles.get(rest_name(self.rank)) or (b"0", [])
        try:
            if int(content) != num_bytes:
                raise PeerMappingError("the memory of the weights is not as large as they are.")
            area = self.make_area(num_bytes, self.device)
        except PeerMappingError:
            for file in files:
                os.close(file)
            raise
        self._mapped.append(area)
        area.map(files)
        return area.raw

    @property
    def are_there(self) -> bool:
        """Whether a predecessor has left any."""
        return bool(self.lasting.cell.get(manifest_name(self.rank)))

    def drop(self) -> None:
        """Let go of the memory: no process uses it again, and this one what it has just mapped."""
        forget_weights(self.lasting, self.rank)
        while self._mapped:
            self._mapped.pop().unmap()


def forget_weights(lasting: LastingMemory | None, rank: Rank) -> None:
    """Let the next process of a rank load its weights anew."""
    if lasting is not None:
        PartManifest.withdraw(lasting.cell, rank)
        lasting.handles.drop(rest_name(rank))


def predecessor_bytes(lasting: LastingMemory | None, rank: Rank) -> int:
    """Return the bytes of a rank's device that hold what its predecessor has left."""
    if lasting is None:
        return 0
    content, files = lasting.handles.get(rest_name(rank)) or (b"0", [])
    for file in files:
        os.close(file)
    return int(content) + (lasting_bytes(lasting, rank) or 0)

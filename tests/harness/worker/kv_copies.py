"""Both kinds of copies from lost groups, in memory of the host."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry
from kvadaptor.transfer.movers import PeerMover
from worker.engine.lost_copies import ArrayPageCopies, LostPageCopies, MoverPageCopies


class CopyKind(Enum):
    """What copies: arrays as on CPU ranks, or a mover as on CUDA ranks."""

    ARRAYS = "arrays"
    MOVER = "mover"


def copies_of(
    kind: CopyKind, geometry: PageGeometry, rank: Rank, kv: Mapping[Rank, Any]
) -> LostPageCopies:
    """Return copies into a rank's memory from that of all, (layers, bytes of one layer) each."""
    if kind is CopyKind.ARRAYS:
        return ArrayPageCopies(geometry, rank, kv)
    memory = {
        int(each): torch.from_numpy(own.reshape(-1)).view(torch.int8) for each, own in kv.items()
    }
    return MoverPageCopies(geometry, rank, PeerMover(rank, memory, geometry))

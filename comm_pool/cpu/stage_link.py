"""Activations from one pipeline stage to the next, over memory that CPU ranks share.

A link is a ring of pieces: the stage before writes, the one after reads, and each counts its pieces
in a word of its own. Messages of any length travel in pieces, so a stage that is ahead waits once
the ring is full. The memory outlives its members, like that of `SharedPlane`.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from comm_pool.cpu.cell_memory import FENCE
from comm_pool.cpu.shared_plane import LOOKS, NAP_S, SEQUENCE_BITS
from comm_pool.formations import Formations, PeerLostError

PIECE_BYTES = 1 << 20
PIECES = 8

_WRITTEN, _READ = 0, 1
_COUNT_MASK = (1 << SEQUENCE_BITS) - 1


def link_bytes() -> int:
    """Return the bytes of the memory of one link."""
    return mmap.PAGESIZE + PIECES * PIECE_BYTES


class StageLink:
    """One end of a link; main loop only.

    Its methods raise `PeerLostError` if the formation is aborted meanwhile. Each formation counts
    from 0 again, so a member that was aborted anywhere in an earlier one starts level with the
    others.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        formations: Formations,
        is_aborted: Callable[[int], bool],
        *,
        sends: bool,
    ) -> None:
        """`memory` is of `link_bytes`; `is_aborted` tells of the group's aborted formations."""
        self._formations = formations
        self._is_aborted = is_aborted
        self._words = memoryview(memory).cast("q")[:2]
        """The progress of both ends: a formation and a number of pieces."""
        self._own, self._other = (_WRITTEN, _READ) if sends else (_READ, _WRITTEN)
        # Probes run outside of steps, where inference tensors could not be written.
        with torch.inference_mode(mode=False):
            raw = torch.frombuffer(memory, dtype=torch.uint8)[mmap.PAGESIZE :]
            self._pieces = raw.view(PIECES, PIECE_BYTES)
        self._formation = self._count = 0
        self._words[self._own] = 0

    @property
    def formation(self) -> int:
        """See `LinkEnd`."""
        return self._formations.formation

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors of any shapes to the next stage; waits while the ring is full."""
        for piece in self._cut([each.contiguous() for each in tensors]):
            self._wait(lambda: self._count - self._others_count() < PIECES)
            self._pieces[self._count % PIECES, : piece.numel()].copy_(piece)
            self._publish()

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill contiguous tensors of the same shapes and types with what the stage before sends."""
        for piece in self._cut(tensors):
            self._wait(lambda: self._others_count() > self._count)
            piece.copy_(self._pieces[self._count % PIECES, : piece.numel()])
            self._others_count()  # Bytes from a sender that has left this formation are void.
            self._publish()

    def done(self) -> Callable[[], bool]:
        """See `LinkEnd`; what is launched is over."""
        return lambda: True

    def release(self) -> None:
        """See `LinkEnd`; both ends look whether the formation is aborted."""

    def _cut(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Begin a message of contiguous tensors in the formation of now; yield its bytes."""
        formation = self._formations.formation
        if formation != self._formation:
            self._formation, self._count = formation, 0
            self._words[self._own] = formation << SEQUENCE_BITS
        if self._formations.is_aborted(formation):
            raise PeerLostError(formation)
        for tensor in tensors:
            yield from tensor.view(-1).view(torch.uint8).split(PIECE_BYTES)

    def _others_count(self) -> int:
        """Return the pieces of the other end in this formation; raises if it is in a later one."""
        formation, count = divmod(self._words[self._other], _COUNT_MASK + 1)
        if formation > self._formation:
            raise PeerLostError(self._formation)
        return count if formation == self._formation else 0

    def _publish(self) -> None:
        self._count += 1
        with FENCE:
            self._words[self._own] = (self._formation << SEQUENCE_BITS) + self._count

    def _wait(self, is_so: Callable[[], bool]) -> None:
        looks = LOOKS
        while not is_so():
            if looks:
                looks -= 1
                continue
            if self._formations.is_aborted(self._formation) or self._is_aborted(self._formation):
                raise PeerLostError(self._formation)
            time.sleep(NAP_S)
        with FENCE:
            pass

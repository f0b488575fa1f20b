"""Collectives of one host's CPU ranks over shared memory, which can be aborted.

vLLM's own spin forever when a member has died, and Gloo fails only for ranks connected to it. Here
each member writes its part and then a word with its progress, and waits for the others' words. A
member that learns of a loss aborts the formation, and all its members raise `PeerLostError`. Sums
follow the order of the members, so all get the same bits. The memory outlives its members
(`cell_memory`): a successor starts at 0, before all its formations.
"""

import mmap
import time
from collections.abc import Iterator
from typing import Any

import torch

from comm_pool.cpu.cell_memory import FENCE
from comm_pool.formations import Formations, PeerLostError

HALF_BYTES = 1 << 20
"""Maximum bytes per round of a message; longer messages take several rounds."""

LOOKS = 20
"""Number of polls before a member sleeps: ranks that share cores must let each other run."""

NAP_S = 0.00002
"""Sleep between polls, instead of `sched_yield`.

Since Linux 6.18 each yield costs its caller a whole time slice, and a process that yields
repeatedly is not run while others want the core.
"""

SEQUENCE_BITS = 39
"""A word is a formation (24 bits) and a sequence number: enough for a year at 10,000 per second."""

_HALF_PRECISION = (torch.bfloat16, torch.float16)


class SharedPlane:
    """The collectives of one group, as vLLM's CPU communicator calls them; main loop only.

    vLLM passes its process group, and the receiver of `gather`, in arguments that are ignored here.
    Every method is collective: all members call it in the same order with equal shapes. Each raises
    `PeerLostError` if the formation is aborted meanwhile.

    A part has two halves, used in turn: before a member writes a half, it has met everyone in the
    collective after the half's last use, so nobody reads it any more. Each formation counts from 1
    again, so a member that was aborted anywhere in an earlier one starts level with the others. A
    late member finds words of another formation and discards the bytes that it has read.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        place: int,
        width: int,
        formations: Formations,
        *,
        rehearses: bool = False,
    ) -> None:
        """`memory` is of `plane_bytes`; this is member `place` of `width`.

        One that rehearses computes with zeros in place of others' parts, until it joins them.
        """
        self._place = place
        self._width = width
        self._formations = formations
        self._memory = memory
        self._rehearses = rehearses
        self._use(mmap.mmap(-1, plane_bytes(width)) if rehearses else memory)

    def join(self) -> None:
        """Stop rehearsing; not to be called within a formation."""
        if self._rehearses:
            self._rehearses = False
            self._use(self._memory)

    def _use(self, memory: mmap.mmap) -> None:
        width, place = self._width, self._place
        others = () if self._rehearses else range(width)
        self._others = tuple(each for each in others if each != place)
        words = memoryview(memory).cast("q")
        self._words = words[:width]
        """The progress of each member; only the member itself writes its word."""
        self._aborts = words[width : 2 * width]
        """One more than the formation that each member aborted last; 0 is none."""
        self._words[place] = self._aborts[place] = 0
        # Members also meet outside of steps, where inference tensors could not be written.
        with torch.inference_mode(mode=False):
            raw = torch.frombuffer(memory, dtype=torch.uint8)[_header_bytes(width) :]
            self._raw = raw.view(2, width, HALF_BYTES)
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._formation = -1
        self._sequence = 0
        self._half = 0

    # ------------------------------------------------------------------ aborting

    def abort(self, formation: int) -> None:
        """Abort this formation for all members; any thread may call this."""
        self._aborts[self._place] = formation + 1

    def is_aborted(self, formation: int) -> bool:
        """Return whether any member has aborted this formation."""
        return formation + 1 in self._aborts.tolist()

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> None:
        """Replace each member's (n, ...) by the sum; half precision is summed in float32."""
        flat = tensor.reshape(-1)
        for at, parts in self._pieces(flat):
            piece = flat[at : at + parts[0].numel()]
            if flat.dtype in _HALF_PRECISION:
                piece.copy_(_sum([part.float() for part in parts]))
            elif self._width == 2:
                torch.add(parts[0], parts[1], out=piece)
            else:
                piece.copy_(_sum([parts[0].clone(), *parts[1:]]))
        if not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, **_: Any) -> None:
        """Fill `output`, (k·n, ...) and contiguous, with the (n, ...) of the members in order."""
        rows = output.view(self._width, -1)
        for at, parts in self._pieces(tensor):
            for row, part in zip(rows, parts, strict=True):
                row[at : at + part.numel()].copy_(part)

    def gather(
        self, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None, **_: Any
    ) -> None:
        """Fill the list, which only one member passes, with the (n, ...) of each member."""
        rows = None if gather_list is None else [each.view(-1) for each in gather_list]
        for at, parts in self._pieces(tensor):
            for row, part in zip(rows or (), parts, strict=rows is not None):
                row[at : at + part.numel()].copy_(part)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """(k, ...) -> (k, ...): part j goes to and comes from member j. Both contiguous."""
        given, taken = sent.view(self._width, -1), received.view(self._width, -1)
        slots = self._slots(sent.dtype)
        step = HALF_BYTES // sent.element_size() // self._width
        for at in range(0, given.shape[1], step):
            piece = given[:, at : at + step]
            count = piece.shape[1]
            self._begin()
            parts = [each[: piece.numel()].view(piece.shape) for each in slots[self._half]]
            parts[self._place].copy_(piece)
            self._meet()
            for row, part in zip(taken, parts, strict=True):
                row[at : at + count].copy_(part[self._place])
            self._check()

    def _pieces(self, tensor: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Exchange (n, ...) piecewise; yield each piece's start and all members' pieces."""
        flat = tensor.reshape(-1)
        slots = self._slots(flat.dtype)
        at = 0
        for piece in flat.split(HALF_BYTES // flat.element_size()):
            count = piece.numel()
            self._begin()
            parts = [each[:count] for each in slots[self._half]]
            parts[self._place].copy_(piece)
            self._meet()
            yield at, parts
            self._check()
            at += count

    def _slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        found = self._typed.get(dtype)
        if found is None:
            with torch.inference_mode(mode=False):
                found = [[part.view(dtype) for part in half] for half in self._raw]
            self._typed[dtype] = found
        return found

    # ------------------------------------------------------------------ words

    def _begin(self) -> None:
        """Begin the next collective, whose half this member may write."""
        formation = self._formations.formation
        if formation != self._formation:
            # Before anything is written: a member of an earlier formation may still be reading.
            self._words[self._place] = formation << SEQUENCE_BITS
            self._formation, self._sequence = formation, 0
        if self._formations.is_aborted(formation):
            raise PeerLostError(formation)
        self._sequence += 1
        self._half = self._sequence & 1

    def _meet(self) -> None:
        """Publish that this member's part is written, and wait for the others' parts."""
        words, wanted = self._words, (self._formation << SEQUENCE_BITS) + self._sequence
        with FENCE:
            words[self._place] = wanted
        for other in self._others:
            looks = LOOKS
            while words[other] < wanted:
                if looks:
                    looks -= 1
                    continue
                if self._formations.is_aborted(self._formation) or self.is_aborted(self._formation):
                    raise PeerLostError(self._formation)
                time.sleep(NAP_S)
        with FENCE:
            pass

    def _check(self) -> None:
        """Raise if a member has left this formation: bytes read from it are then void."""
        words, after = self._words, (self._formation + 1) << SEQUENCE_BITS
        for other in self._others:
            if words[other] >= after:
                raise PeerLostError(self._formation)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the members' order; overwrites the first part."""
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def _header_bytes(width: int) -> int:
    """Return the bytes of the words, rounded up to whole memory pages."""
    return -(-2 * width * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def plane_bytes(width: int) -> int:
    """Return the bytes of a plane of `width` members."""
    return _header_bytes(width) + 2 * width * HALF_BYTES

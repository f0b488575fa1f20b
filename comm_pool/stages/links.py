"""What connects the pipeline stages of a group. Memory and devices differ, the words do not.

A link is a ring of pieces in memory that two stages map: the stage before writes, the one after
reads, and each counts its pieces in a word of its own. `comm_pool.cpu.stage_link` has the one of
CPU ranks, `worker.engine.runners.stage_link` that of CUDA ranks.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from comm_pool.formations import Formations


class LinkEnd(Protocol):
    """One end of a link; of `send` and `receive` it has one.

    Both raise `PeerLostError` if the formation of now was aborted.
    """

    @property
    def formation(self) -> int:
        """The formation of now."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors of any shapes to the next stage."""

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill contiguous tensors of the same shapes and types with what the stage before sends."""

    def done(self) -> Callable[[], bool]:
        """Return a query for whether all that was launched here until now is over; any thread."""

    def release(self) -> None:
        """Let what waits for the other end in an aborted formation go on; any thread."""


class MakesLink(Protocol):
    """Makes an end of a link over mapped memory, whose formation of now `formations` has."""

    def __call__(
        self,
        memory: mmap.mmap,
        formations: Formations,
        is_aborted: Callable[[int], bool],
        *,
        sends: bool,
    ) -> LinkEnd:
        """`is_aborted` tells of the group's aborted formations."""


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The links of one pipeline stage: the first has none before it, the last none after it."""

    before: LinkEnd | None
    after: LinkEnd | None
    tokens: LinkEnd | None = None
    """What the last stage samples, on its way to the first one, where devices pass that on."""

    @property
    def ends(self) -> tuple[LinkEnd, ...]:
        """Those that it has."""
        return tuple(e for e in (self.before, self.after, self.tokens) if e is not None)

    def done(self) -> Callable[[], bool]:
        """See `LinkEnd`; of all."""
        queries = [each.done() for each in self.ends]
        return lambda: all(is_done() for is_done in queries)

    def release(self) -> None:
        """Release all."""
        for each in self.ends:
            each.release()

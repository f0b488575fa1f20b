"""Copies of whole blocks from the KV memory of lost groups into a rank's own.

A block of a lost group may lie divided among its members otherwise than this rank's group divides
it, so a copy takes the pieces of its share from where each of them lies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.reshard.order import order_of
from kvadaptor.shares import Numbers, holder_of, numbers_of, pieces_of, share_of, units_of
from kvadaptor.transfer.rounds import Mover, by_source

Bytes = npt.NDArray[np.uint8]

COPIES_MAX = 64
"""Copies from lost groups that a mover begins before it is waited for."""


class LostPageCopies(Protocol):
    """Copies what a rank needs of blocks of lost groups."""

    def copy(
        self,
        directory: GroupDirectory,
        blocks: Numbers,
        into: Numbers,
        split: Split,
        member: int,
    ) -> int:
        """Copy a member's share of these blocks of a group into its slots `into`; both are (n,).

        `split` is that of the member's own group. Returns the bytes.
        """


@dataclass(frozen=True, slots=True)
class ArrayPageCopies:
    """Copies in memory of the host; they are over when `copy` returns."""

    geometry: PageGeometry
    rank: Rank
    kv: Mapping[Rank, Bytes]
    """The KV memory of each rank, (layers, bytes of one layer); only its own is written."""

    def copy(
        self,
        directory: GroupDirectory,
        blocks: Numbers,
        into: Numbers,
        split: Split,
        member: int,
    ) -> int:
        """See `LostPageCopies`."""
        shape, share, copied = directory.shape, share_of(self.geometry, split, member), 0
        there, here = self.geometry.slots(shape.split), share.slots
        pieces = pieces_of(there, here, share.number)
        unit_bytes = self.geometry.layer_page_bytes // pieces.columns
        to = self.kv[self.rank].reshape(-1, unit_bytes)
        for piece in pieces.pieces:
            place = holder_of(there, shape.split.tp, piece.share)
            rank = Rank(shape.ranks[place])
            pages = self._pages_of(rank)
            numbers = numbers_of(there, pages, directory.slots(place, blocks))
            layers = range(piece.source_layer, piece.source_layer + pieces.layers)
            at = units_of(there, pages, pieces.columns, numbers, layers, piece.source_column)
            read = self.kv[rank].reshape(-1, unit_bytes)[at]
            layers = range(piece.target_layer, piece.target_layer + pieces.layers)
            own, column = self._pages_of(self.rank), piece.target_column
            numbers = numbers_of(here, own, into)
            to[units_of(here, own, pieces.columns, numbers, layers, column)] = read
            copied += read.nbytes
        return copied

    def _pages_of(self, rank: Rank) -> int:
        return int(self.kv[rank].shape[1]) // self.geometry.layer_page_bytes


class MoverPageCopies:
    """Copies by a mover that reads all ranks' memory; what the device does next follows them.

    For groups whose members all have other shares than each other.
    """

    def __init__(self, geometry: PageGeometry, rank: Rank, mover: Mover) -> None:
        self._geometry, self._rank, self._mover = geometry, rank, mover
        self._count = 0
        """Copies since the mover was last waited for."""

    def copy(
        self,
        directory: GroupDirectory,
        blocks: Numbers,
        into: Numbers,
        split: Split,
        member: int,
    ) -> int:
        """See `LostPageCopies`; only begins the copies."""
        theirs = directory.shape.split
        finest = Split(math.lcm(split.pp, theirs.pp), math.lcm(split.tp, theirs.tp))
        order, there = order_of(split, finest), self._geometry.slots(theirs)
        ranks, units = (np.empty((finest.width, blocks.size), dtype=np.int64) for _ in range(2))
        source = order_of(theirs, finest)
        for share in range(theirs.width):
            place, fragments = holder_of(there, theirs.tp, share), source.fragments_of(share)
            units[fragments] = source.units_of(directory.slots(place, blocks))
            ranks[fragments] = directory.shape.ranks[place]
        own = order.fragments_of(share_of(self._geometry, split, member).number)
        target = order.units_of(into)
        copies = by_source(ranks[own].reshape(-1), units[own].reshape(-1), target.reshape(-1))
        finish, self._count = self._mover.start({self._rank: copies}, finest), self._count + 1
        if self._count == COPIES_MAX:
            # Now and then, as it waits for the device: the mover keeps the times of its copies.
            self._count = 0
            finish()
        return target.size * (self._geometry.page_bytes // finest.width)

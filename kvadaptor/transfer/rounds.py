"""The copies of one round of a re-shard, and what carries them out; without torch."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvadaptor.geometry import Split
from kvadaptor.transfer.move_stats import MoveStats

Units = npt.NDArray[np.int64]
"""Unit numbers."""

CopiesBySource = Mapping[int, tuple[Units, Units]]
"""Source rank -> (source units, destination units), each (c,) int64; may include oneself."""

Round = Mapping[int, CopiesBySource]
"""Destination rank -> its copies. A round writes no unit that it reads."""

Finish = Callable[[], MoveStats]
"""Waits until this rank's copies have arrived, and returns their statistics."""


class MoveError(ValueError):
    """Units that do not exist, or memory that cannot be copied in units; nothing was copied."""


class Mover(Protocol):
    """Moves units between ranks, numbered in the mover's group.

    The units of a page are the slots of the split `finest`, as a plan says.
    """

    @property
    def is_one_sided(self) -> bool:
        """Whether a rank copies without its peers, so that copies can run beside their steps."""

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Begin this rank's part of a round.

        `launched` is called once the device has all of the work, or first if no device is used.
        Copies started before the end follow these, and both end together.
        """

    def move(self, copies: Round, finest: Split) -> MoveStats:
        """Do this rank's part of a round; return when this rank's copies have arrived."""

    def warm(self, units: int) -> None:
        """Prepare for units of 1/`units` of the heads; collective, while no page is used."""


def by_source(src_ranks: Units, src_units: Units, dst_units: Units) -> CopiesBySource:
    """Split a plan's three arrays, (c,) each in any order, by source rank."""
    ranks = np.flatnonzero(np.bincount(src_ranks))
    masks = {int(rank): src_ranks == rank for rank in ranks}
    return {rank: (src_units[mask], dst_units[mask]) for rank, mask in masks.items()}

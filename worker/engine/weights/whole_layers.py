"""Decides at start-up how many layers all ranks hold whole, with `--whole-layers auto`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from comm_pool.loans import fewest_whole_layers, most_whole_layers

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AutoWhole:
    """The goal and the bound of the number of whole layers, which all ranks hold alike."""

    floor_goal_s: float | None
    """The longest step that loans alone may take, in seconds; None: any."""
    room_bytes: int | None
    """The memory that whole layers may take; None: as much as they want."""
    agree: Callable[[int], int]
    """Returns the largest number that any rank gives; a collective."""

    def decide(
        self, part_bytes: Sequence[int], parts: int, bytes_per_s: float, other_s: float = 0.0
    ) -> int:
        """Return the fewest whole layers that reach the goal, as far as every rank has room.

        `part_bytes[layer]` is the size of one part of a layer; `bytes_per_s` is what this rank
        copies while all do. Loans of no layer take `other_s` of each step. A collective.
        """
        wanted, most = 0, len(part_bytes)
        if self.floor_goal_s is not None:
            goal_s = max(0.0, self.floor_goal_s - other_s)
            wanted = fewest_whole_layers(part_bytes, parts, bytes_per_s, goal_s)
        if self.room_bytes is not None:
            most = most_whole_layers(part_bytes, parts, self.room_bytes)
        # The slowest link and the fullest device decide for all.
        layers = min(self.agree(wanted), -self.agree(-most))
        log.info(
            "whole_layers",
            bytes_per_s=round(bytes_per_s),
            goal_s=self.floor_goal_s,
            room_bytes=self.room_bytes,
            wanted=wanted,
            most=most,
            layers=layers,
        )
        return layers

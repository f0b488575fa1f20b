"""Decides at start-up how many layers all ranks hold whole, with `--whole-layers auto`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch
from vllm.config import VllmConfig

from comm_pool.loans import fewest_whole_layers, most_whole_layers
from worker.engine.device import free_bytes

log = structlog.get_logger()

WHOLE_SHARE = 0.5
"""Part of the memory left beside the parts that whole layers may take; the rest is for KV."""


@dataclass(frozen=True, slots=True)
class AutoWhole:
    """The goal and the bound of the number of whole layers, which all ranks hold alike."""

    floor_goal_s: float | None
    """The longest step that loans alone may take, in seconds; None: any."""
    room_bytes: int | None
    """The memory that whole layers may take; None: as much as they want."""
    agree: Callable[[int], int]
    """Returns the largest number that any rank gives; a collective."""

    def decide(self, part_bytes: Sequence[int], parts: int, bytes_per_s: float) -> int:
        """Return the fewest whole layers that reach the goal, as far as every rank has room.

        `part_bytes[layer]` is the size of one part of a layer; `bytes_per_s` is what this rank
        copies while all do. A collective.
        """
        wanted, most = 0, len(part_bytes)
        if self.floor_goal_s is not None:
            wanted = fewest_whole_layers(part_bytes, parts, bytes_per_s, self.floor_goal_s)
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


def room_for_whole(config: VllmConfig, device: torch.device) -> int | None:
    """Return the bytes that whole layers may take once the parts are loaded; None on CPU."""
    given = config.cache_config.kv_cache_memory_bytes
    if device.type == "cpu":
        return None
    free = free_bytes(config, device, before=0)
    return max(0, min(int(WHOLE_SHARE * free), free - (given or 0)))

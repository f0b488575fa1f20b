"""Whether the KV memory that a user names fits beside the weights. Pure."""

from collections.abc import Sequence

from coordinator.protocol.config import CellConfig
from coordinator.protocol.engine_options import GivenOption, size_value

GIB = 2**30
KV_BYTES = "--kv-cache-memory-bytes"
KEEP_SHARE = 0.1
"""Part of what the weights leave that an advised value leaves too, for what processes need."""
ROUND_BYTES = 2**20
"""Advised values are multiples of this."""


def kv_refusal(
    cell: CellConfig, options: Sequence[GivenOption], room: int, held: int, where: str
) -> str | None:
    """Return the sentence about KV memory that does not fit; None if it does, or none is named.

    `room` is the memory in bytes, of a device or, on CPU, of the machine that `where` names; `held`
    is what the weights of all ranks there take.
    """
    asked = size_value(options, KV_BYTES)
    sharers = cell.ranks if cell.device == "cpu" else cell.ranks_per_device
    if asked <= 0 or asked * sharers + held <= room:
        return None
    advised = advised_bytes(room, held, sharers)
    ranks = f"each of {sharers} ranks takes" if sharers > 1 else "a rank takes"
    remedy = f"use at most {KV_BYTES} {advised}" if advised else "use fewer --ranks"
    return (
        f"{KV_BYTES} {asked}: {ranks} {asked / GIB:,.1f} GiB for KV beside weights of "
        f"{held / GIB:,.1f} GiB in all, but {where} has room for {room / GIB:,.1f} GiB: {remedy}, "
        "or leave it out."
    )


def advised_bytes(room: int, held: int, sharers: int) -> int:
    """Return KV memory for each of some ranks that fits beside the weights; 0 if none does."""
    each = int((room - held) * (1 - KEEP_SHARE)) // sharers
    return max(0, each // ROUND_BYTES * ROUND_BYTES)

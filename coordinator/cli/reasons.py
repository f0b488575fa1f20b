"""Finds in the output of a child why it failed. Pure."""

from collections.abc import Mapping
from typing import Any

REFUSERS = ("aileron: ", "gateway: ", "coordinator: ")
"""How a process begins the line with its reason."""


def reason_in(line: str) -> str | None:
    """Return the reason in a line with which a process refuses to go on."""
    for refuser in REFUSERS:
        if line.startswith(refuser):
            return line.removeprefix(refuser)
    return None


def reason_of_event(fields: Mapping[str, Any]) -> str | None:
    """Return the reason in the event of a rank that failed."""
    match fields:
        case {"event": "rank_failed", "rank": rank, "reason": str(reason)}:
            return f"rank {rank} failed: {reason}"
    return None


def restarts_rank(fields: Mapping[str, Any]) -> bool:
    """Return whether the event says that a failed rank starts again, so the cell goes on."""
    return fields.get("event") == "rank_exited" and fields.get("starts_in_s") is not None

"""Reads the events that a process logs, one JSON object a line."""

import json
from typing import Any


def events_of(log: str, name: str) -> list[dict[str, Any]]:
    """Return the events of this name, in order; other output among them is skipped."""
    lines = [line for line in log.splitlines() if f'"event": "{name}"' in line]
    return [json.loads(line) for line in lines]

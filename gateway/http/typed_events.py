"""Events of streams that name their type, as the Responses and the Messages API have them. Pure."""

from typing import Any

import msgspec

DATA = b"\ndata: "
"""Begins an event's fields, after its name."""


def fields_of(event: bytes) -> dict[str, Any]:
    """Return the fields of an event."""
    fields: dict[str, Any] = msgspec.json.decode(event.partition(DATA)[2])
    return fields


def typed(fields: dict[str, Any]) -> bytes:
    """Return an event with these fields; its name is their type."""
    return b"event: %s\ndata: %s\n\n" % (fields["type"].encode(), msgspec.json.encode(fields))

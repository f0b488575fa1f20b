"""What all messages between processes have in common."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages: immutable and tagged with its class name on the wire."""

"""The base of all messages between processes."""

import msgspec

PROTOCOL_VERSION = 14
"""Raised when a message changes its meaning; peers with another version are refused."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages: immutable and tagged with its class name on the wire."""

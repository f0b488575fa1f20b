"""The protocol between the processes of a cell: messages, the switch participant, the wire.

This is the only part of `coordinator` that `gateway` and `worker` may import.
"""

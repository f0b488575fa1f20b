"""What the processes of a cell say to each other: messages, the pure rank-side seat, the wire.

The only part of `coordinator` that `gateway` and `worker` may import.
"""

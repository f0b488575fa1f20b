"""The traffic of a rank's copies."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoveStats:
    """The traffic of one call into this rank: bytes from other ranks, own bytes, seconds."""

    link_bytes: int
    local_bytes: int
    seconds: float

    def plus(self, other: "MoveStats") -> "MoveStats":
        """Return the sums of both."""
        return MoveStats(
            self.link_bytes + other.link_bytes,
            self.local_bytes + other.local_bytes,
            self.seconds + other.seconds,
        )

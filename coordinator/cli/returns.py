"""Which ranks of a running cell have ended, and the words for those that are back. Pure."""

from collections.abc import Callable, Mapping
from typing import Any


class Returns:
    """The ranks that ended and have not been ready since, from the launcher's events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._ended_s: dict[int, float] = {}

    def words_for(self, fields: Mapping[str, Any]) -> str | None:
        """Take an event; return the text to show if a rank is back."""
        match fields:
            case {"event": "rank_exited", "rank": int(rank)}:
                self._ended_s.setdefault(rank, self._clock())
            case {"event": "rank_progress", "rank": int(rank), "stage": "ready"}:
                ended_s = self._ended_s.pop(rank, None)
                if ended_s is not None:
                    return f"rank {rank} is back after {self._clock() - ended_s:.1f} s"
        return None

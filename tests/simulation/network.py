"""A network that loses, delays, repeats and reorders, on a virtual clock.

Sessions are what gRPC gives: first in, first out, until they break, and then everything under way
is lost. Level-triggered messages travel outside that order, where anything may happen to them;
token pushes are first in, first out per sender.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

Handler = Callable[[], None]


@dataclass
class Weather:
    """How bad the network is; all chances per message."""

    delay_max: int = 3
    loss: float = 0.0
    repeat: float = 0.0


@dataclass
class Session:
    """One side's view of a connection; `is_open` turns false once and for all."""

    is_open: bool = True
    last_due: dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        self.is_open = False


class Network:
    """Everything that is under way."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self.weather = weather
        self.now = 0
        self._rng = rng
        self._under_way: list[tuple[int, int, Handler]] = []
        self._count = 0

    def in_order(
        self, session: Session, direction: str, deliver: Handler, not_before: int = 0
    ) -> None:
        """Send within a session: never before what was sent earlier, and not after it broke.

        What is sent while nothing passes arrives `not_before` that is over.
        """
        due = max(self._due(), not_before, session.last_due.get(direction, 0))
        session.last_due[direction] = due

        def arrive() -> None:
            if session.is_open:
                deliver()

        self._put(due, arrive)

    def loosely(self, deliver: Handler) -> None:
        """Send what is level-triggered: it may be lost, repeated, late and out of order."""
        if self._rng.random() < self.weather.loss:
            return
        self._put(self._due(), deliver)
        if self._rng.random() < self.weather.repeat:
            self._put(self._due(), deliver)

    def run(self, now: int) -> None:
        """Deliver all that is due."""
        self.now = now
        while self._under_way and self._under_way[0][0] <= now:
            heappop(self._under_way)[2]()

    def _due(self) -> int:
        return self.now + 1 + int(self._rng.random() * self.weather.delay_max)

    def _put(self, due: int, deliver: Handler) -> None:
        self._count += 1
        heappush(self._under_way, (due, self._count, deliver))

"""A coordinator ends while some ranks have heard that a move is committed, and others have not.

The ranks that know are cut off from the next coordinators for a while, or all are for a moment. No
coordinator can tell then what its predecessor decided, so ranks may end the move differently.
Clients must not notice.
"""

import random
from collections.abc import Callable

from tests.simulation.sweep import Kind
from tests.simulation.world import FAULT_TICKS, World

LAST_TICK = FAULT_TICKS - 30
"""Later crashes would be healed before they matter."""

SWITCHES_AT_LEAST = 0.05
"""Chance of a switch in each tick: moves must come often."""

LONG_TICKS, SHORT_TICKS, CORE_TICKS = (60, 80, 120), (6, 12), (2, 5)
"""How long the ranks that know are cut off, how long the others are, and until a coordinator is
there again."""


class HalfHeardWorld(World):
    """A world in which a coordinator may end in the middle of telling of a commit."""

    def __init__(self, seed: int, kind: Kind, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, trace, 0.0, wide=kind.wide, parts=kind.parts, borrow=kind.borrow)
        self.faults.switch = max(self.faults.switch, SWITCHES_AT_LEAST)
        self.half_heard = 0
        """How many commits were half heard when the coordinator ended."""
        self._chance = random.Random(f"half heard {seed}")
        self._last_epoch = 0

    def _tick(self) -> None:
        super()._tick()
        if self.core is None or self.now > LAST_TICK:
            return
        switcher = self.core._switcher
        epoch = switcher.stage.epoch
        if epoch == self._last_epoch or not switcher.has_moved(epoch):
            return
        knows = [each.participant.known_migration[0] >= epoch for each in self.alive]
        if any(knows) and not all(knows) and self._chance.random() < 0.5:
            self._last_epoch = epoch
            self.half_heard += 1
            for process, is_known in zip(self.alive, knows, strict=True):
                ticks = self._chance.choice(LONG_TICKS if is_known else SHORT_TICKS)
                self.faults.cut_off(self, process.rank, ticks)
            self.faults._crash_core(self)
            self.faults._core_at = self.now + self._chance.choice(CORE_TICKS)

"""Ranks whose weights go wrong, and groups that compute wrongly: what the numerical guard is for.

Drawn from a generator of its own. A rank that has gone wrong spoils every group that it is in until
a new process takes its place; a group may also be wrong from its start, whatever its ranks are.
Only probes tell, and those come when a group has just been formed.
"""

import random
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from tests.simulation.checkers import check

if TYPE_CHECKING:
    from tests.simulation.world import World


class Drift:
    """What computes wrongly by now."""

    def __init__(self, seed: int, *, is_on: bool) -> None:
        self.rng = random.Random(f"drift {seed}")
        self._chance = self.rng.choice((0.0, 0.0, 0.005, 0.02)) if is_on else 0.0
        self._wrong: dict[Rank, int] = {}
        """Ranks whose weights are wrong, in which incarnation."""
        self._groups: set[tuple[Rank, ...]] = set()

    def strike(self, world: "World", groups: list[tuple[Rank, ...]]) -> None:
        if self.rng.random() >= self._chance:
            return
        if self.rng.random() < 0.5:
            wide = [ranks for ranks in groups if len(ranks) > 1]
            self._groups.add(self.rng.choice(wide))
        else:
            rank = Rank(self.rng.randrange(8))
            self._wrong[rank] = world.incarnations[rank]
            world.say(f"rank {rank} computes wrongly from now on")
        world.stats.drifts += 1

    @property
    def is_on(self) -> bool:
        return self._chance > 0.0

    def is_wrong(self, world: "World", ranks: tuple[Rank, ...]) -> bool:
        """Return whether the group that these ranks have just formed computes wrongly."""
        return ranks in self._groups or any(
            self._wrong.get(rank) == world.incarnations[rank] for rank in ranks
        )


def check_layout(world: "World") -> None:
    """No group serves whose probe has drifted, unless it is all that is left."""
    assert world.core is not None
    guard = world.core._roster.guard
    groups = world.core._switcher.target.layout.groups
    for group in groups:
        alone = len(groups) == 1 and group.width == 1
        check(alone or guard.why_not(group) is None, f"{group} serves though it has drifted")
    world.stats.left_out += 8 - sum(group.width for group in groups)

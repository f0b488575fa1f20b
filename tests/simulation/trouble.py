"""What goes wrong beyond crashes and a lossy network: one-way partitions, clocks, slow ranks.

Drawn from a generator of its own, so that the faults of `faults` stay what they are for a seed.
"""

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from comm_pool.layout import Rank
from coordinator.model.policy_settings import PolicySettings, PolicyStart
from coordinator.model.settings import CoreSettings
from coordinator.model.step_line import StepLine
from tests.simulation.book_gateway import BookGateway

if TYPE_CHECKING:
    from tests.simulation.world import World

Way = Literal["up", "down", "tokens"]
"""To the coordinator, from it, or from a rank straight to the gateways."""

JUMPS_MS = (500, 5_000, 3_600_000)
ORIGIN_MS_MAX = 10_000_000
"""Monotonic clocks of two processes may be hours apart."""

SLOW_TICKS = 10
"""A slow rank acts once in so many ticks."""

STEP_TIMES = {
    "dp1": StepLine(0.012, 2e-5, 2e-8),
    "tp2": StepLine(0.009, 1.2e-5, 1e-8),
    "tp4": StepLine(0.007, 8e-6, 6e-9),
    "tp8": StepLine(0.006, 6e-6, 4e-9),
}


@dataclass(frozen=True)
class Block:
    """One direction that nothing passes; what is sent in order arrives when it is over."""

    until: int


class Trouble:
    """Chances per tick, and what is wrong right now."""

    def __init__(self, seed: int, *, is_on: bool) -> None:
        self.is_on = is_on
        self.rng = random.Random(f"trouble {seed}")
        self.one_way = self.rng.choice((0.0, 0.0, 0.01, 0.04))
        self.jump = self.rng.choice((0.0, 0.0, 0.01))
        self.slow = self.rng.choice((0.0, 0.0, 0.01))
        self._blocks: dict[tuple[Rank | str, Way], Block] = {}

    def until(self, peer: Rank | str, way: Way) -> int:
        """The tick until which nothing passes from or to the peer this way; 0 if it does."""
        block = self._blocks.get((peer, way))
        return block.until if block is not None else 0

    def is_blocked(self, peer: Rank | str, way: Way, now: int) -> bool:
        return now < self.until(peer, way)

    def strike(self, world: "World") -> None:
        """One tick's worth of trouble."""
        if not self.is_on:
            return
        chance = self.rng.random
        if chance() < self.one_way:
            self._block(world)
        if chance() < self.jump:
            self._jump(world)
        if chance() < self.slow and (slow := world.ranks[Rank(self.rng.randrange(8))]):
            slow.pace = SLOW_TICKS
            world.stats.slowed += 1
            world.say(f"rank {slow.rank} is slow from now on")
        if self.slow and chance() < 0.02:
            for rank in world.alive:
                rank.pace = 1

    def heal(self, world: "World") -> None:
        self._blocks.clear()
        for rank in world.alive:
            rank.pace = 1

    def origin_ms(self) -> int:
        """Where the clock of a new coordinator begins."""
        return self.rng.randrange(ORIGIN_MS_MAX) if self.is_on else 0

    def policy(self, settings: CoreSettings) -> CoreSettings:
        """Let the adaptive policy choose layouts too, in some runs."""
        if not self.is_on or self.rng.random() >= 0.4:
            return settings
        hasty = PolicySettings(
            decide_every_ms=self.rng.choice((100, 250)),
            stay_ms=self.rng.choice((100, 500)),
            settle_ms=100,
            caution_ms=self.rng.choice((0, 200, 60_000)),
            horizon_ms=2_000,
            switches_per_minute_max=600,
            pin_ms=self.rng.choice((0, 300)),
        )
        return replace(settings, policy=PolicyStart(hasty, (1, 2, 4, 8), STEP_TIMES))

    def _block(self, world: "World") -> None:
        peer: Rank | str
        way: Way = self.rng.choice(("up", "down", "tokens"))
        if way == "tokens" or self.rng.random() < 0.7:
            peer = Rank(self.rng.randrange(8))
        else:
            peer = self.rng.choice(("east", "west"))
        until = world.now + self.rng.choice((5, 40, 80))
        self._blocks[peer, way] = Block(until)
        world.stats.one_way += 1
        world.say(f"nothing passes {way} of {peer} until {until * 10} ms")

    def _jump(self, world: "World") -> None:
        jump_ms = self.rng.choice(JUMPS_MS)
        world.stats.clock_jumps += 1
        match self.rng.randrange(3):
            case 0:
                world.core_clock_ms += jump_ms
                world.say(f"the coordinator's clock jumps by {jump_ms} ms")
            case 1:
                for rank in world.alive[:: self.rng.choice((1, 3))]:
                    rank.clock_jump_ms += jump_ms
                    world.say(f"the clock of rank {rank.rank} jumps by {jump_ms} ms")
            case _:
                gateway = world.gateways[self.rng.choice(("east", "west"))]
                assert isinstance(gateway, BookGateway)
                gateway.clock_jump_s += jump_ms / 1_000
                world.say(f"the clock of {gateway.name} jumps by {jump_ms} ms")

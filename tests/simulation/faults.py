"""What goes wrong, and how often; drawn once per seed, so that some runs are mild, some wild."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from comm_pool.layout import Group, Layout, Mode, Rank, supported_layouts
from comm_pool.mixed import Staged
from coordinator.model.events import RenewalWanted
from coordinator.model.settings import CoreSettings, OutlierSettings, QueueBounds, TierBounds
from coordinator.protocol.terms import Carry, Phase, Tier
from coordinator.switching.targets import have_joined
from tests.simulation.checkers import MoveChecker
from tests.simulation.network import Weather
from worker.launch.restarts import split

if TYPE_CHECKING:
    from tests.simulation.world import World

WIDTHS = (1, 2, 4, 8)
LAYOUTS = supported_layouts(8, WIDTHS, (Mode.DP, Mode.TP))
NARROWEST_OF_PARTS = 4
LAYOUTS_OF_PARTS = tuple(
    each for each in LAYOUTS if all(group.width >= NARROWEST_OF_PARTS for group in each.groups)
)
"""Those that serve where ranks hold parts of the weights."""
LAYOUTS_OF_BLOCKS = tuple(
    each for each in LAYOUTS_OF_PARTS if all(g.width == NARROWEST_OF_PARTS for g in each.groups)
)
"""The same where those that are started again have no communicators with the others."""
PIPELINES = Staged(2, 1), Staged(4, 1), Staged(2, 2)
PAIRS_WIDTH = 4


def _in_pairs(layout: Layout) -> Layout:
    """Make pp2tp2 of each group of four stages."""
    return Layout(
        tuple(
            replace(each, tp=2) if each.mode is Mode.PP and each.width == PAIRS_WIDTH else each
            for each in layout.groups
        )
    )


_STAGED_LAYOUTS = tuple(
    each
    for each in supported_layouts(8, (1, 2, 4), (Mode.DP, Mode.TP, Mode.PP))
    if any(group.mode is Mode.PP for group in each.groups)
)
LAYOUTS_OF_STAGES = tuple(dict.fromkeys((*_STAGED_LAYOUTS, *map(_in_pairs, _STAGED_LAYOUTS))))
"""Those with pipeline groups."""
LONG_DRAIN_MS = 60_000
"""A limit that comes after the run: nothing waits for tasks that cannot end."""
OFTEN = {
    Carry.RESHARD: 5,
    Carry.SPECULATE: 2,
    Carry.PAUSE: 2,
    Carry.DRAIN: 1,
    Carry.RECOMPUTE: 1,
}
CARRIES = tuple(carry for carry, times in OFTEN.items() for _ in range(times))
"""What switches carry; the most intricate plan most often."""


class Faults:
    """Chances per tick, and what is broken right now."""

    pipelines: tuple[Staged, ...] = ()
    """The pipeline groups that ranks have prepared."""

    def __init__(self, rng: random.Random, *, parts: bool = False, borrow: bool = False) -> None:
        self.rng = rng
        self.weather = Weather(
            delay_max=rng.choice((1, 3, 8)),
            loss=rng.choice((0.0, 0.05, 0.3)),
            repeat=rng.choice((0.0, 0.1)),
        )
        self.switch = rng.choice((0.03, 0.06, 0.15))
        self.patience = rng.choice((0.0, 0.9, 1.0))
        """How often a switch under way is waited for."""
        self.crash = rng.choice((0.0, 0.0, 0.002, 0.01))
        self.meddle = rng.choice((0.0, 0.0, 0.0, 0.3))
        """While KV moves, and just after that was decided: then much can be done by halves."""
        self.cut = rng.choice((0.0, 0.0, 0.004, 0.02))
        self.stop = rng.choice((0.0, 0.01, 0.05))
        self.break_session = rng.choice((0.0, 0.005, 0.03))
        self.move_fails = rng.choice((0.0, 0.0, 0.0, 0.05))
        self.core_crash = rng.choice((0.0, 0.0, 0.006))
        self.submit = rng.choice((0.05, 0.15, 0.4))
        self.cancel = rng.choice((0.0, 0.02, 0.1))
        self.gateway_returns = 0.1
        # With few layouts to choose from, paused tasks see theirs come back.
        self.layouts = rng.choice((LAYOUTS, rng.sample(LAYOUTS, 2), rng.sample(LAYOUTS, 3)))
        if parts and not borrow:
            self.layouts = LAYOUTS_OF_PARTS
        self._cut_until: dict[Rank, int] = {}
        self._restart_at: dict[Rank, int] = {}
        self._exit_at: dict[Rank, int] = {}
        own = random.Random(str(rng.getstate()))
        self.spins = own.random() < 0.25
        """A collective with a dead peer never ends, instead of failing."""
        self.pairs = own.random() < 0.2
        """A rank's neighbour dies with it."""
        self.together = own.choice((0, 0, 5, 80))
        """Ranks that are to be started again within so many ticks start together."""
        self.renewal = own.choice((0.0, 0.0, 0.004))
        """An operator has all ranks started again."""
        self.shares_memory = not self.spins and own.random() < 0.5
        """Ranks that are started again join those that live."""
        self.block = 1
        """Aligned ranks of so many end together, and are started again together."""
        if parts:
            self.spins = False
            self.shares_memory = random.Random(f"{own.getstate()} parts").random() < 0.6
        if parts and not self.shares_memory:
            self.block = NARROWEST_OF_PARTS
            if not borrow:
                self.layouts = LAYOUTS_OF_BLOCKS
        # Drawn apart, so that the faults of a seed stay what they are.
        self._memory = random.Random(f"{rng.getstate()} memory")
        self.trusts_memory = self._memory.random() < 0.7
        """Where ranks share memory, that of one which has ended can be read."""
        start_ticks = self._memory.choice((0, 50))
        self.start_ticks = start_ticks if self.shares_memory and self.trusts_memory else 0
        """How long ranks take to start: others may read the memory of their predecessors then."""
        self.loss = self._memory.choice((0.0, 0.01, 0.03)) if self.shares_memory else 0.0
        """A member of a group with tasks crashes."""
        self.drains = self.spins and random.Random(f"{rng.getstate()} drains").random() < 0.5
        """Those who are in such a collective are let out alive, and close their group for good."""
        self._rooms = random.Random(f"{rng.getstate()} rooms")
        self.no_room = self._rooms.choice((0.0, 0.0, 0.0, 0.05))
        """A rank in a step finds no room on its device."""
        self._own = own
        self._core_at = 0
        self._now = 0

    def add_stages(self) -> None:
        """Draw layouts with pipeline groups, and more tasks."""
        self.pipelines = PIPELINES
        own = random.Random(f"{self.rng.getstate()} pipelines")
        both = (*LAYOUTS, *LAYOUTS_OF_STAGES, *LAYOUTS_OF_STAGES)
        few = [*own.sample(LAYOUTS_OF_STAGES, 2), *own.sample(LAYOUTS, own.choice((0, 1)))]
        self.layouts = own.choice((both, few, few))
        self.submit = own.choice((0.15, 0.4, 0.8))

    def calm(self) -> None:
        """Let clients submit and cancel, and operators switch; in some runs, ranks end at times."""
        self.crash = self.rng.choice((0.0, 0.003))
        self.meddle = self.cut = self.stop = self.break_session = 0.0
        self.move_fails = self.core_crash = self.renewal = self.loss = self.no_room = 0.0
        self.weather.loss = 0.0
        self.patience = self.rng.choice((0.0, 0.5, 0.9))

    def is_cut(self, rank: Rank) -> bool:
        """The network between the rank and the coordinator is down."""
        return self._now < self._cut_until.get(rank, 0)

    def strike(self, world: "World") -> None:
        """One tick's worth of trouble."""
        self._now = world.now
        self._load(world)
        self.recover(world)
        chance = self.rng.random
        if chance() < self.crash:
            self._crash(world, Rank(self.rng.randrange(8)))
        if self.loss and self._memory.random() < self.loss:
            self._crash_member(world)
        if chance() < self.cut:
            rank = Rank(self.rng.randrange(8))
            self.cut_off(world, rank, self.rng.choice((5, 40, 80)))
        if chance() < self.stop and (stopped := world.ranks[Rank(self.rng.randrange(8))]):
            stopped.stopped_until = world.now + self.rng.choice((3, 10, 50))
            world.say(f"rank {stopped.rank} stands still until {stopped.stopped_until * 10} ms")
        if chance() < self.break_session:
            if chance() < 0.7:
                world.break_rank(Rank(self.rng.randrange(8)))
            else:
                world.break_gateway(self.rng.choice(("east", "west")))
        if chance() < self.core_crash:
            self._crash_core(world)
        if self._own.random() < self.renewal and world.core is not None:
            world.core_event(RenewalWanted())
        if self._rooms.random() < self.no_room:
            process = world.ranks[Rank(self._rooms.randrange(8))]
            if process is not None and process.participant.serving:
                process.engine.lacks_room = True
        if (phase := moving_phase(world)) is not None and chance() < self.meddle:
            self._meddle(world, is_told=phase is not Phase.MOVE)

    def cut_off(self, world: "World", rank: Rank, ticks: int) -> None:
        """Take the network between a rank and the coordinator down for this time."""
        self._cut_until[rank] = world.now + ticks
        world.say(f"rank {rank} is cut off until {self._cut_until[rank] * 10} ms")
        world.break_rank(rank)

    def heal(self, world: "World") -> None:
        """Nothing goes wrong from now on."""
        world.say("all faults heal")
        self._now = world.now
        self._cut_until.clear()
        self.weather.loss = self.weather.repeat = 0.0
        self.weather.delay_max = 1
        self.gateway_returns = 1.0
        for process in world.alive:
            process.stopped_until = 0
            process.engine.lacks_room = False
        if world.core is not None:
            for rank in world.core._roster:
                world.core._roster[rank].out_until_ms = 0
        for rank, there in world.ranks.items():
            if there is None:
                self._restart_at[rank] = world.now
        self.recover(world)
        if world.core is None:
            world.start_core()

    def _load(self, world: "World") -> None:
        gateway = world.gateways[self.rng.choice(("east", "west"))]
        if self.rng.random() < self.submit:
            gateway.submit(self.rng)
        if self.rng.random() < self.cancel:
            gateway.cancel_any(self.rng)
        is_wanted = self.rng.random() < self.switch and world.core is not None
        if is_wanted and (world.is_serving or self.rng.random() >= self.patience):
            self._switch(world)

    def _meddle(self, world: "World", *, is_told: bool) -> None:
        match self.rng.choices(range(4), (1, 6, 3, 1) if is_told else (6, 1, 1, 1))[0]:
            case 0:
                world.gateways[self.rng.choice(("east", "west"))].cancel_any(self.rng)
            case 1:
                self._switch_partly(world)
            case 2:
                self._crash_core(world)
            case _ if self.crash:
                self._crash(world, Rank(self.rng.randrange(8)))

    def _switch_partly(self, world: "World") -> None:
        """Want another layout in which some wide groups stay that are just being formed."""
        formed_now = forming(world)
        known = (*LAYOUTS, *LAYOUTS_OF_STAGES) if self.pipelines else LAYOUTS
        partly = [layout for layout in known if formed_now.intersection(layout.groups)]
        if partly:
            self._switch(world, self.rng.choice(partly))

    def _crash_core(self, world: "World") -> None:
        if world.core is not None:
            world.say("the coordinator crashes")
            world.stop_core()
            self._core_at = world.now + self.rng.choice((2, 15, 50))

    def _switch(self, world: "World", wanted: Layout | None = None) -> None:
        layout = wanted or self.rng.choice(self.layouts)
        gone = [
            rank for rank in layout.ranks if world.core and not world.core.views.is_available(rank)
        ]
        carry = self.rng.choice(CARRIES)
        world.want_switch(layout.without(gone), carry)

    def _crash(self, world: "World", rank: Rank) -> None:
        process = world.ranks[rank]
        if process is None:
            return
        world.crash(rank)
        self._restart_at[rank] = world.now + self.rng.choice((5, 30, 80)) + self.start_ticks
        if self.rng.random() < 0.5:
            self._exit_at[rank] = world.now + 2
        neighbour = Rank(rank ^ 1)
        if self.pairs and world.ranks[neighbour] is not None:
            self.kill(world, neighbour)
            self._restart_at[neighbour] = self._restart_at[rank]
        self._fall(world, rank)

    def _crash_member(self, world: "World") -> None:
        """Let any member of a group whose leader has tasks crash."""
        groups = [each.runtime.bound_key for each in world.alive if each.runtime.has_tasks]
        if groups:
            self._crash(world, self._memory.choice(self._memory.choice(groups)))

    def _fall(self, world: "World", rank: Rank) -> None:
        """End those that cannot serve without this one, as the launcher does."""
        first = rank - rank % self.block
        block = tuple(map(Rank, range(first, first + self.block)))
        for mate in block:
            if self.block > 1 and world.ranks[mate] is not None:
                self.kill(world, mate)
        self._restart_at |= dict.fromkeys(block, max(self._restart_at[each] for each in block))

    def give_up(self, world: "World", rank: Rank) -> None:
        """Let a rank's process end itself, and with it those that cannot serve without it."""
        self.kill(world, rank)
        self._fall(world, rank)

    def kill(self, world: "World", rank: Rank) -> None:
        """End a rank's process alone, and let the launcher see it."""
        world.crash(rank)
        self._restart_at[rank] = world.now + 30 + self.start_ticks
        self._exit_at[rank] = world.now + 2

    def renew(self, world: "World", known: dict[Rank, int]) -> None:
        """Start ranks again, as the launcher does, unless newer ones were started since."""
        are_up = all(world.ranks[rank] for rank in known)
        if are_up and known.items() <= world.incarnations.items():
            is_all = len(known) == len(world.ranks)
            world.say("all ranks are renewed" if is_all else f"ranks {sorted(known)} are renewed")
            world.stats.renewed += is_all
            world.stats.renewed_parts += not is_all
            for rank in known:
                if world.ranks[rank] is not None:
                    self.kill(world, rank)
                    self._fall(world, rank)

    def recover(self, world: "World") -> None:
        for rank in [rank for rank, at in self._exit_at.items() if world.now >= at]:
            del self._exit_at[rank]
            world.exited(rank)
        if any(world.now >= at for at in self._restart_at.values()):
            soon = world.now + self.together
            due = [rank for rank, at in self._restart_at.items() if at <= soon]
            for ranks in split(due, WIDTHS, 8):
                for rank in ranks:
                    del self._restart_at[rank]
                    if self._exit_at.pop(rank, None) is not None:
                        world.exited(rank)
                world.restart(ranks)
                if len(ranks) == len(world.ranks):
                    # Nobody is left who knows of a move. With a coordinator that knows of none
                    # either, epochs begin anew.
                    world.moves = MoveChecker()
        if world.core is None and world.now >= self._core_at:
            world.start_core()


def draw_bounds(rng: random.Random) -> QueueBounds:
    """Bounds that some runs meet all the time and others never."""
    own = random.Random(str(rng.getstate()))
    tiers = {
        tier: TierBounds(own.choice((2, 4, None)), own.choice((300, 2_000, None)))
        for tier in Tier
        if own.random() < 0.3
    }
    return QueueBounds(rng.choice((4, 4_096)), tiers)


def draw_settings(rng: random.Random, world: int, *, precopy: bool = False) -> CoreSettings:
    """The times and limits of one run."""
    lease_ms = rng.choice((200, 300))
    own = random.Random(str(rng.getstate()))
    waits_long = random.Random(f"{rng.getstate()} drains").random() < 0.5
    return CoreSettings(
        world=world,
        layout=rng.choice(LAYOUTS),
        lease_ms=lease_ms,
        lost_after_ms=lease_ms + rng.choice((0, 60)),
        recover_ms=lease_ms,
        pause_limit_ms=rng.choice((100, 800)),
        drain_limit_ms=max(rng.choice((0, 200, 600)), LONG_DRAIN_MS * waits_long),
        queue=draw_bounds(rng),
        ageing_ms=500,
        default_carry=rng.choice(CARRIES),
        history_max=100,
        claim_ms=300,
        gateway_gone_ms=400,
        settled_ms=own.choice((50, 300, 3_000)),
        renew_idle_ms=own.choice((0, 10, 40)),
        renew_busy_ms=random.Random(f"{rng.getstate()} busy").choice((0, 0, 100, 400)),
        answer_ms=own.choice((0, 10, 30)),
        health=OutlierSettings(late_out_ms=(200, 100, 600)),
        precopy=precopy,
    )


def forming(world: "World") -> set[Group]:
    """Wide groups that some of their members may have joined."""
    if world.core is None:
        return set()
    switcher = world.core._switcher
    roster = world.core._roster
    new = [each for each in switcher.target.bindings if not have_joined(each, roster)]
    return {each.group for each in new if each.group.width > 1}


def moving_phase(world: "World") -> Phase | None:
    """MOVE while ranks copy KV, SERVE while they are told that it counts, or None."""
    if world.core is None:
        return None
    switcher = world.core._switcher
    is_told = not switcher.is_serving and switcher.has_moved(switcher.epoch)
    return switcher.stage.phase if is_told or switcher.stage.phase is Phase.MOVE else None

"""One switch in calm weather, and a crash at a chosen point of it.

A point is what one role is just doing. A first run lists them all; then each gets a run of its own,
which is the same up to that point. Nothing else goes wrong, so every task must finish.
"""

import dataclasses
from dataclasses import dataclass

from comm_pool.layout import Mode, Rank, parse_layout
from coordinator.model.events import Event
from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import Move
from coordinator.protocol.terms import Carry
from tests.simulation.checkers import Violation, check
from tests.simulation.faults import WIDTHS
from tests.simulation.fibers import FiberEnded
from tests.simulation.rest import check_rest, unrest_of
from tests.simulation.sim_rank import SimRank
from tests.simulation.world import WORLD, World

COORDINATOR, GATEWAY = "coordinator", "gateway"
REST_TICKS = 1_500
TASKS = 12
BEGUN_TOKENS = 30
"""So many have been delivered when the switch is wanted."""
EXIT_SEEN, SILENT, STUCK = "exit seen", "silent", "stuck"
"""How the others learn of a rank's end, and whether collectives with it never end either."""


@dataclass(frozen=True)
class Switch:
    """What is switched, and how."""

    origin: str
    wanted: str
    carry: Carry

    @property
    def has_stages(self) -> bool:
        """Whether a pipeline group is in it."""
        return Mode.PP.value in self.origin + self.wanted

    def __str__(self) -> str:
        return f"{self.origin} to {self.wanted} by {self.carry.value}"


@dataclass(frozen=True)
class Point:
    """A role, what it is doing, and for which time in this switch."""

    role: str
    label: str
    time: int = 0

    def __str__(self) -> str:
        return f"{self.role}: {self.label} ({self.time})"


class CrashWorld(World):
    """A world in which only one thing goes wrong, or nothing."""

    def __init__(self, switch: Switch, crash: Point | None = None, how: str = EXIT_SEEN) -> None:
        super().__init__(1, pipelines=switch.has_stages)
        self._switch, self._crash, self._how = switch, crash, how
        self.points: list[Point] = []
        self.crashed_at: int | None = None
        self._is_on = False
        """The switch has been wanted, and is not over."""
        self._times: dict[tuple[str, str], int] = {}
        self._reported: dict[Rank, str] = {}
        self.num_pages = dict.fromkeys(self.ranks, 40)
        self.max_tokens, self.step_ticks = 48, 0
        self.faults.spins = how == STUCK
        self.faults.shares_memory = how != STUCK
        self.faults.move_fails = 0.0
        self.faults.together = 0
        weather = self.faults.weather
        weather.loss, weather.repeat, weather.delay_max = 0.0, 0.0, 2
        self.settings = dataclasses.replace(
            self.settings,
            layout=parse_layout(switch.origin, WORLD, WIDTHS),
            queue=QueueBounds(4_096),
            default_carry=Carry.RESHARD,
        )
        self.close()
        self.start_ranks()

    def run_switch(self) -> "CrashWorld":
        """Serve, switch, crash on the way, and come to rest with every task finished."""
        with self.running():
            return self._run_switch()

    def _run_switch(self) -> "CrashWorld":
        self.start_core()
        self._until(lambda: self.is_serving, "the first layout serves")
        for number in range(TASKS):
            tuple(self.gateways.values())[number % 2].submit(self.rng, deadlines_ms=(0,))
        self._until(lambda: self.stats.tokens >= BEGUN_TOKENS, "tasks have begun")
        self._is_on = True
        self.want_switch(parse_layout(self._switch.wanted, WORLD, WIDTHS), self._switch.carry)
        self._until(lambda: unrest_of(self) is None, "all is at rest")
        check_rest(self)
        check(set(self.stats.ends) == {"finished"}, f"streams ended by {self.stats.ends}")
        return self

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        for _ in range(REST_TICKS):
            if condition():
                return
            self._tick()
            self.faults.recover(self)
        reason = unrest_of(self)
        raise Violation(f"not within {REST_TICKS} ticks: {what} ({reason})")

    # ------------------------------------------------------------------ points

    def _is_here(self, role: str, label: str) -> bool:
        """Take note of a point; say whether the crash is here."""
        if not self._is_on or self.crashed_at is not None:
            return False
        time = self._times.get((role, label), 0)
        self._times[role, label] = time + 1
        point = Point(role, label, time)
        self.points.append(point)
        if point != self._crash:
            return False
        self.crashed_at = self.now
        self.say(f"crash at {point}")
        return True

    def point(self, rank: Rank, label: str) -> None:
        if self._is_here(f"rank {rank}", label):
            raise FiberEnded

    def note(self, rank: Rank, move: Move) -> None:
        super().note(rank, move)
        label = type(move).__name__.lower()
        self._reported[rank] = f"{label} is reported"

    def act(self, rank: SimRank) -> None:
        try:
            if (label := self._reported.pop(rank.rank, None)) is not None:
                self.point(rank.rank, label)
            rank.act()
        except FiberEnded:
            self._end(rank.rank)

    def _directive_arrives(self, core: int, rank: Rank, directive: Directive, number: int) -> None:
        process = self.ranks[rank]
        wanted = process.participant.wanted if process is not None else None
        is_new = wanted is not None and directive.stage > wanted.stage
        super()._directive_arrives(core, rank, directive, number)
        try:
            if is_new and process is not None:
                self.point(rank, f"{directive.stage.phase.name} is heard")
        except FiberEnded:
            self._end(rank)

    def _end(self, rank: Rank) -> None:
        self.faults.kill(self, rank)
        if self._how == SILENT:
            del self.faults._exit_at[rank]

    def core_event(self, event: Event) -> None:
        """As in every world, but the coordinator may end before or in the middle of its effects."""
        if self.core is None:
            return
        switcher = self.core._switcher
        before = switcher.stage
        effects = self.effects_of(self.core, event)
        stage, crash_after = switcher.stage, len(effects) + 1
        if stage != before:
            tells = {"decided": 0, "half told": len(effects) // 2, "told": len(effects)}
            for label, told in tells.items():
                if self._is_here(COORDINATOR, f"{stage.phase.name} is {label}"):
                    crash_after = told
            if self._is_here(GATEWAY, f"{stage.phase.name} is decided"):
                self.break_gateway("east")
            self._is_on &= not switcher.is_serving
        for effect in effects[:crash_after]:
            self._perform(effect)
        if crash_after <= len(effects):
            self.faults._crash_core(self)


def points_of(switch: Switch, how: str = EXIT_SEEN) -> list[Point]:
    """Every point that the switch passes when nothing goes wrong.

    Where ranks are to get stuck, they compute on devices, so there are other points.
    """
    return CrashWorld(switch, how=how).run_switch().points

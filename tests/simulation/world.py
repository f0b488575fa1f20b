"""A whole cell on one virtual clock: the real core, real seats, and everything that goes wrong.

`World(seed).run()` is deterministic: faults for a while, then quiet, in which everything must come
to rest: one layout served by all ranks, every task ended, every page accounted for.
"""

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from comm_pool.layout import Layout, Rank
from comm_pool.plan import communicator_plan
from coordinator.core.core import Core
from coordinator.model.events import (
    Effect,
    Event,
    ForecastMade,
    GatewayClosed,
    GatewayOpened,
    GatewaySent,
    Note,
    Observed,
    RankClosed,
    RankExited,
    RankOpened,
    RankReported,
    SwitchRecorded,
    SwitchWanted,
    Tick,
    ToGateway,
    ToLauncher,
    ToRank,
)
from coordinator.protocol.messages.gateway import GatewayHello, GatewayToCore, Submit
from coordinator.protocol.messages.rank import Directive, RankHello, Report
from coordinator.protocol.switch_actions import Move
from coordinator.protocol.terms import Carry
from tests.simulation.audit import QueueAudit
from tests.simulation.book_gateway import BookGateway
from tests.simulation.checkers import (
    MoveChecker,
    StageChecker,
    Violation,
    check_pages_of_leader,
)
from tests.simulation.drift import Drift
from tests.simulation.faults import (
    NARROWEST_OF_PARTS,
    WIDTHS,
    Faults,
    draw_settings,
)
from tests.simulation.lenders import draw_pages, lent_parts
from tests.simulation.network import Network, Session
from tests.simulation.open_steps import OpenSteps
from tests.simulation.rank_memory import RankMemories
from tests.simulation.rest import check_rest, unrest_of
from tests.simulation.sim_gateway import SimGateway, Token
from tests.simulation.sim_host import TICK_MS
from tests.simulation.sim_rank import SimRank
from tests.simulation.stats import Stats
from tests.simulation.trace import event_line, line_of, logs_to, move_line
from tests.simulation.trouble import Trouble

WORLD = 8
CORE_TICKS = 2
"""The core gets a `Tick` so often."""
GATEWAY_TICKS = 10
"""Gateways look so often at what has waited too long."""
FAULT_TICKS = 220
QUIET_TICKS = 1_000
STAGES_MAX = 4
"""A task that is alone in a pipeline group waits for every stage between two tokens."""
FAILURES = (AssertionError, LookupError, ValueError)
"""What a broken invariant shows itself as."""


class World:
    """Eight ranks, two gateways, one coordinator and a seed."""

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        meddle: float | None = None,
        *,
        wide: bool = False,
        parts: bool = False,
        borrow: bool = False,
        precopy: bool = False,
        pipelines: bool = False,
    ) -> None:
        """`wide` adds the gateways' real book, the policy, the real planner, and `Trouble`.

        With `parts` each rank holds a part of the weights, so that only groups of four serve. With
        `borrow` too, narrower groups read the parts that they lack from others of their four. With
        `precopy` ranks copy KV before they leave their groups. With `pipelines` some groups have
        pipeline stages.
        """
        self.rng = random.Random(seed)
        self._trace = trace
        self.now = 0
        self.faults = Faults(self.rng, parts=parts or borrow, borrow=borrow)
        if pipelines:
            self.faults.add_stages()
        self._quiet_ticks = QUIET_TICKS * (STAGES_MAX if pipelines else 1)
        self.trouble = Trouble(seed, is_on=wide)
        self.drift = Drift(seed, is_on=wide)
        self.core_clock_ms = 0
        """How far the coordinator's clock is ahead of the world's."""
        if meddle is not None:
            self.faults.meddle = meddle
        self.network = Network(self.rng, self.faults.weather)
        fewest = self.rng.choice((8, 11, 16, 24, 40))
        # The longest task just fits the smallest rank that is alone.
        longest = min(48, 4 * (fewest - 1) - 14)
        self.max_tokens = self.rng.choice((4, longest, longest, longest))
        self.step_ticks = self.rng.choice((0, 1, 2))
        """How long a step takes at least."""
        self._numbers = itertools.count(1)
        self.stays = itertools.count(1)
        """Numbers of the stays of tasks in groups."""
        self.stats = Stats()
        self.incarnations = dict.fromkeys(map(Rank, range(WORLD)), 1)
        self.num_pages = dict.fromkeys(self.incarnations, fewest)
        if wide or borrow:
            self.num_pages = draw_pages(seed, self.incarnations, fewest)
        self._stages = StageChecker()
        self.moves = MoveChecker()
        self.steps = OpenSteps(self)
        plan = communicator_plan(WORLD, WIDTHS)
        self.cohorts = dict.fromkeys(self.incarnations, 0)
        """The cohort of each rank's newest process."""
        self._groups = [*plan, *((rank,) for rank in self.incarnations)]
        self.core: Core | None = None
        self.cores = 0
        """Coordinators that were started so far."""
        self._peers: dict[Rank | str, Session] = {}
        """The sessions that the core has heard a hello of; its answers go there."""
        self.settings = self.trouble.policy(draw_settings(self.rng, WORLD, precopy=precopy))
        if borrow:
            self.settings = replace(self.settings, parts=lent_parts(self.faults, seed))
        elif parts:
            self._divide_weights(seed)
        self.ranks: dict[Rank, SimRank | None] = {}
        self.start_ranks()
        make = BookGateway if wide else SimGateway
        self.gateways: dict[str, SimGateway | BookGateway] = {
            name: make(self, name) for name in ("east", "west")
        }

    def _divide_weights(self, seed: int) -> None:
        """Begin in a layout that serves where ranks hold parts of the weights."""
        layout = self.faults.layouts[seed % len(self.faults.layouts)]
        self.settings = replace(
            self.settings, layout=layout, narrowest=NARROWEST_OF_PARTS, settled_ms=0
        )

    @property
    def now_ms(self) -> int:
        return self.now * TICK_MS

    @property
    def alive(self) -> list[SimRank]:
        return [rank for rank in self.ranks.values() if rank is not None]

    def start_ranks(self) -> None:
        """Start all ranks for the first time."""
        everyone = list(self.incarnations)
        self.memory = RankMemories(
            *(WORLD, communicator_plan(WORLD, WIDTHS), WIDTHS, max(self.num_pages.values())),
            self.faults.pipelines,
            outlive=self.faults.shares_memory,
        )
        reach = self.memory.start(everyone, self.incarnations, shares=False)
        with logs_to(None):
            self.ranks |= {rank: SimRank(self, rank, 1, reach) for rank in everyone}

    def run(self) -> Stats:
        """Run to rest; raises `Violation` or another assertion."""
        with self.running():
            return self._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put what ranks log into the trace, and end all processes at last."""
        with logs_to(self.say if self._trace is not None else None):
            try:
                yield
            finally:
                self.close()

    def close(self) -> None:
        """End all processes."""
        for process in self.alive:
            process.crash()
        gc.enable()  # Ranks pause it in a switch, and may have ended in one.

    def _run(self) -> Stats:
        self.start_core()
        while self.now < FAULT_TICKS:
            self._tick()
            self.faults.strike(self)
            self.trouble.strike(self)
            self.drift.strike(self, self._groups)
        self.trouble.heal(self)
        self.faults.heal(self)
        reason = "nothing was tried"
        for _ in range(self._quiet_ticks):
            self._tick()
            self.faults.recover(self)
            if (unrest := unrest_of(self)) is None:
                check_rest(self)
                return self.stats
            reason = unrest
        for process in self.alive:
            self.say(f"rank {process.rank} is {process.core!r}")
        raise Violation(f"no rest after {self._quiet_ticks} quiet ticks: {reason}")

    def _tick(self) -> None:
        self.now += 1
        self.network.run(self.now)
        self._connect()
        self._run_devices()
        # Everyone is first at times.
        order = self.alive
        first = self.rng.randrange(len(order)) if order else 0
        for rank in (*order[first:], *order[:first]):
            if self.ranks[rank.rank] is not rank:
                continue  # It was ended within this tick.
            if self.now >= rank.stopped_until and self.now % rank.pace == 0:
                self.act(rank)
            self._stages.see(rank.rank, rank.incarnation, rank.participant.stage)
            if self.settings.precopy and self.ranks[rank.rank] is rank:
                check_pages_of_leader(rank)
            if self.core and not (
                self.core.views.is_recovering or self.core.views.is_available(rank.rank)
            ):
                rank.cut_out_at = self.now
        if self.core is not None and self.now % CORE_TICKS == 0:
            self.core_event(Tick())
            if self.core is not None and self.now % 8 == 0:
                self.core.integrity()
        if self.now % GATEWAY_TICKS == 0:
            for gateway in self.gateways.values():
                gateway.tick()

    def _run_devices(self) -> None:
        """Let all devices go on until none can."""
        if self.faults.spins:
            while any(process.engine.run_device() for process in self.alive):
                pass

    def act(self, rank: SimRank) -> None:
        rank.act()

    def point(self, rank: Rank, label: str) -> None:
        """A rank is in the middle of something: those who crash it at such points listen."""

    def start_core(self) -> None:
        self.cores += 1
        self.core_clock_ms = self.trouble.origin_ms()
        self.core = Core(self.settings, f"core-{self.cores}", self._core_now_ms)

    def stop_core(self) -> None:
        self.core = None
        self._peers.clear()
        self.stats.core_crashes += 1
        sessions = [rank.session.link for rank in self.alive]
        sessions += [gateway.session for gateway in self.gateways.values()]
        for session in sessions:
            if session is not None:
                session.close()
        for gateway in self.gateways.values():
            gateway.broken()

    def crash(self, rank: Rank) -> None:
        process = self.ranks[rank]
        if process is None:
            return
        self.say(f"rank {rank} crashes")
        self.stats.crashes += 1
        process.crash()
        if not self.faults.trusts_memory:
            process.distrust()
        self.break_rank(rank)
        self.ranks[rank] = None

    def restart(self, ranks: tuple[Rank, ...]) -> None:
        """Start these again, together: on their own, or among the others if those share memory."""
        for rank in ranks:
            self.incarnations[rank] += 1
        shares = self.faults.shares_memory
        reach = self.memory.start(ranks, self.incarnations, shares=shares)
        self.cohorts |= dict.fromkeys(ranks, reach.cohort)
        for rank in ranks:
            number = self.incarnations[rank]
            self.say(f"rank {rank} restarts as {number} in cohort {reach.cohort}")
            self.ranks[rank] = SimRank(self, rank, number, reach)

    def exited(self, rank: Rank) -> None:
        if self.core is not None:
            self.core_event(RankExited(rank))

    def break_rank(self, rank: Rank) -> None:
        process = self.ranks[rank]
        if process is None or process.session.link is None or not process.session.is_open:
            return
        process.session.link.close()
        if self.core is not None:
            self.core_event(RankClosed(rank, process.incarnation))

    def break_gateway(self, name: str) -> None:
        session = self.gateways[name].session
        if session is not None and session.is_open:
            session.close()
            self.gateways[name].broken()
            if self.core is not None:
                self.core_event(GatewayClosed(name))

    def _connect(self) -> None:
        """Peers without a session try to open one now and then."""
        if self.core is None:
            return
        for rank in self.alive:
            if rank.session.is_open or self.now < rank.stopped_until:
                continue
            if not self.faults.is_cut(rank.rank) and self.rng.random() < 0.3:
                rank.connected(Session())
        for gateway in self.gateways.values():
            is_open = gateway.session is not None and gateway.session.is_open
            if not is_open and self.rng.random() < self.faults.gateway_returns:
                gateway.connected(Session())

    def rank_says(self, process: SimRank, session: Session, message: RankHello | Report) -> None:
        rank = process.rank
        later = self.trouble.until(rank, "up")
        match message:
            case RankHello():
                opened = RankOpened(message)
                self.network.in_order(
                    session, "up", lambda: self._open(rank, session, opened), later
                )
            case Report() if message.ended or message.returned:
                said = RankReported(rank, message)
                self.network.in_order(session, "up", lambda: self.core_event(said), later)
            case Report() if self.now < later:
                pass
            case Report():
                core = self.core
                self.network.loosely(lambda: self._report_arrives(core, rank, message))

    def _report_arrives(self, core: Core | None, rank: Rank, report: Report) -> None:
        # No message outlives the process that it was sent to.
        if core is self.core and not self.faults.is_cut(rank):
            self.core_event(RankReported(rank, report))

    def to_core(self, session: Session, gateway: str, message: GatewayToCore) -> None:
        later = self.trouble.until(gateway, "up")
        if isinstance(message, GatewayHello):
            opened = GatewayOpened(message)
            self.network.in_order(
                session, "up", lambda: self._open(gateway, session, opened), later
            )
        else:
            said = GatewaySent(gateway, message)
            self.network.in_order(session, "up", lambda: self.core_event(said), later)

    def _open(self, peer: Rank | str, session: Session, opened: Event) -> None:
        self._peers[peer] = session
        self.core_event(opened)

    def push_tokens(
        self, rank: Rank, pipe: Session, gateway: str, tokens: tuple[Token, ...]
    ) -> None:
        self.stats.tokens += len(tokens)
        receiver = self.gateways[gateway]
        later = self.trouble.until(rank, "tokens")
        self.network.in_order(pipe, gateway, lambda: receiver.on_tokens(tokens), later)

    def core_event(self, event: Event) -> None:
        if self.core is None:
            return
        if self._trace is not None and not isinstance(event, Tick | RankReported):
            self.say(f"core <- {event_line(event)}")
        audit = None
        if isinstance(event, GatewaySent) and isinstance(event.message, Submit):
            audit = QueueAudit(self.core, self.settings.queue, event.message)
        effects = self.effects_of(self.core, event)
        if audit is not None:
            audit.check()
        for effect in effects:
            self._perform(effect)

    def effects_of(self, core: Core, event: Event) -> list[Effect]:
        """Let the coordinator handle an event, and note whom it knows once it has recovered."""
        was_recovering = core.views.is_recovering
        effects = core.handle(event, self._core_now_ms)
        if was_recovering and not core.views.is_recovering:
            heard = core._roster.reported()
            self.moves.recovered(self.cores, [(r, core._roster[r].incarnation) for r in heard])
        return effects

    @property
    def _core_now_ms(self) -> int:
        return self.now_ms + self.core_clock_ms

    def _perform(self, effect: Effect) -> None:
        if self._trace is not None and (line := line_of(effect)):
            self.say(line)
        match effect:
            case ToRank(rank, Directive()) if self.trouble.is_blocked(rank, "down", self.now):
                pass
            case ToRank(rank, Directive() as directive):
                core, number = self.cores, next(self._numbers)
                self.network.loosely(lambda: self._directive_arrives(core, rank, directive, number))
            case ToRank(rank, message):
                process = self.ranks[rank]
                session = self._peers.get(rank)
                if process is not None and session is not None:
                    later = self.trouble.until(rank, "down")
                    self.network.in_order(
                        session, "down", lambda: process.on_message(message), later
                    )
            case ToGateway(name, answer):
                gateway = self.gateways[name]
                if (session := self._peers.get(name)) is not None:
                    later = self.trouble.until(name, "down")
                    self.network.in_order(
                        session, "down", lambda: gateway.on_message(answer), later
                    )
            case ToLauncher(wanted):
                self.faults.renew(self, dict(wanted.ranks))
            case SwitchRecorded(record):
                self.stats.saw_switch(record.cause)
            case Note() | Observed() | ForecastMade():
                pass

    def _directive_arrives(self, core: int, rank: Rank, directive: Directive, number: int) -> None:
        process = self.ranks[rank]
        # What one coordinator said is read before another one is told hello.
        if process is not None and not self.faults.is_cut(rank) and process.greeted <= core:
            process.on_message(directive, number, core)

    @property
    def is_serving(self) -> bool:
        return self.core is not None and self.core.views.is_serving

    def want_switch(self, layout: Layout, carry: Carry) -> None:
        if self.core is not None:
            self.core_event(SwitchWanted(layout, carry, "operator"))

    def say(self, line: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now_ms:6d} ms  {line}")

    def note(self, rank: Rank, move: Move) -> None:
        if self._trace is not None:
            self.say(f"rank {rank}: {move_line(move)}")

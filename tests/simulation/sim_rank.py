"""A rank's process: the product's core, loop and runtime, over an engine, a host and a session.

Only these three are simulated, and the thread that watches for lost peers, which acts here at the
ticks of the world.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, RankDown, Stop, TokenBatch
from coordinator.protocol.switch_actions import Join, Leave, Move, Reshard, Resolve, Serve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding
from kvadaptor.slot_table import UNMAPPED
from kvadaptor.transfer.rounds import MoveError
from tests.harness.worker.fake_kv import FakeKV
from tests.simulation.checkers import Violation, check, check_nothing_waits
from tests.simulation.network import Session
from tests.simulation.rank_memory import Reach
from tests.simulation.sim_engine import SimEngine, spec_of
from tests.simulation.sim_gateway import Token
from tests.simulation.sim_host import TICK_MS, SimHost, SimInbox
from tests.simulation.sim_scheduler import is_built_early
from tests.simulation.sim_session import HEARTBEAT_TICKS, SimSession
from worker.launch.peer_failure import Loss, PeerFailure
from worker.launch.watchdog import Progress, abort_formation
from worker.rank.core import Procedure, RankCore
from worker.rank.engine import NoRoomError
from worker.rank.events import (
    DeferStep,
    Effect,
    Event,
    FinishStep,
    ForgetSteps,
    LeadStep,
    Obey,
    Overtaken,
    Probe,
    Publish,
    Result,
    StepFailed,
    Tick,
)
from worker.rank.loop import RankLoop
from worker.rank.runtime import GroupRuntime

if TYPE_CHECKING:
    from tests.simulation.world import World

WATCH_TICKS = 10
"""How often the watchdog looks."""

STUCK_S = 0.6
"""How long a rank may stay in a group that it knows to lack a member."""

PROGRESS_LIMIT_S = 3.0
"""How long a main loop may make no progress: longer than any peer stands still or is cut off."""

MOVES_AT_ONCE = 20
"""More actions than a rank can have to make within one pass."""

PASSES_MAX = 40
"""More passes than a rank can have to make within one tick."""


SWITCHING = (
    *(Leave, Join, Serve, Reshard, Resolve, Publish),
    *(DeferStep, FinishStep, ForgetSteps, Obey, Probe),
)
"""Effects after which a process may end; the others are those of every step."""


class SimCore(RankCore):
    """Reports each effect to the world; before it waits, it checks that it may."""

    process: "SimRank"
    asked = 0
    """How often it has asked itself for an action within this pass."""

    def handle(self, event: Event, now_ns: int) -> Effect | None:
        if isinstance(event, Tick):
            self.asked = 0
        return super().handle(event, now_ns)

    def _carry_out(self, move: Move) -> Procedure[bool]:
        is_made = yield from super()._carry_out(move)
        if is_made:
            self.process.world.note(self.process.rank, move)
        return is_made

    def _due_move(self) -> Move | None:
        self.asked += 1
        if self.asked >= MOVES_AT_ONCE:  # No `check`: to write down a core takes long.
            raise Violation(f"{self!r} makes moves without end")
        move = super()._due_move()
        if move is None and self.stop_reason is None:
            check_nothing_waits(self.participant)
        return move


class SimLoop(RankLoop):
    """Tells the world what the core asks for."""

    process: "SimRank"

    def _result_of(self, effect: Effect) -> Result:
        self.process.begins(effect)
        result = super()._result_of(effect)
        self.process.has_done(effect, result)
        return result


class SimRank:
    """One process of one rank."""

    def __init__(self, world: "World", rank: Rank, incarnation: int, reach: Reach) -> None:
        self.world = world
        self.rank = rank
        self.incarnation = incarnation
        self.cohort = reach.cohort
        self.clock_jump_ms = 0
        self.stopped_until = 0
        self.pace = 1  # ticks from one turn to the next
        self.cut_out_at = -1
        """When the coordinator last had no place for this rank."""
        self.greeted = 0
        """The coordinator that was told hello last."""
        self.leads_since = -1
        """When the core last asked for a step: it had a time lease then."""
        self.had_no_room_in: set[int] = set()
        """Formations in which a step found no room."""
        self.left_as_lost: set[int] = set()
        """Formations that it left since a member was lost; that one may be back by now."""
        self._newest = 0
        """The number of the newest directive that came."""
        self._senders: dict[int, tuple[Directive, int]] = {}
        """Directives that came, by their `id`, with the numbers of their coordinators."""
        self._unheard: list[RankDown] = []
        """What the session's thread has not looked at, as the process stood still."""
        self._is_woken = False
        """Whether the watchdog looks at once."""
        self._tokens_out = Session()
        self._copied: tuple[Directive, int] | None = None
        """The last migration that was carried out, and when."""
        self.host = SimHost(self, self._run)
        self.inbox = SimInbox()
        self.inbox.host = self.host
        self.session = SimSession(self)
        self.participant = SwitchParticipant(rank, incarnation)
        reach.memory.take(self, world.num_pages[rank])
        self._memory = reach.memory
        faults = world.faults
        spec = spec_of(
            rank,
            reach.memory.ranks,
            reach.widths,
            reach.pipelines,
            reach.cohort,
            reach.together,
            joins=reach.joins,
            shares_memory=faults.shares_memory,
        )
        self.engine = SimEngine(self, reach.memory, spec, on_device=faults.spins)
        self.runtime = GroupRuntime(self.engine, incarnation, self, self.host)
        self.core = SimCore(
            self.engine,
            self.runtime,
            self.participant,
            HEARTBEAT_TICKS / 100,
            probes_after_switch=world.drift.is_on,
        )
        self.core.process = self
        session: Any = self.session
        self.loop = SimLoop(self.core, session, self.inbox)
        self.loop.process = self
        steps = self.runtime.steps
        self.loss = PeerFailure(self.participant, STUCK_S, lambda: steps.draining_groups)
        poll_s = WATCH_TICKS * TICK_MS / 1_000
        self.progress = Progress(lambda: self.loop.passes, PROGRESS_LIMIT_S, poll_s)

    def memory_of(self, source: int) -> FakeKV:
        """Return the KV memory of a rank, numbered from the first of the cohort."""
        return self._memory.memory[self.engine.spec.first + source]

    @property
    def is_replaced(self) -> bool:
        """Whether a newer process has its rank."""
        return self.world.incarnations[self.rank] != self.incarnation

    # ------------------------------------------------------------------ what it does in a tick

    def act(self) -> None:
        """Go on, with all of the process' threads, as far as it can in this tick."""
        self._overhear()
        self.session.beat()
        is_woken, self._is_woken = self._is_woken, False
        if (is_woken or self.world.now % WATCH_TICKS == self.rank) and self._watch():
            return
        for thread in self.host.threads:
            thread.run_due()
        for _ in range(PASSES_MAX):
            if not self.host.is_due:
                return
            try:
                self.host.fiber.resume()
            except (PeerLostError, NoRoomError, MoveError) as error:
                self.world.say(f"rank {self.rank} ends: {error}")
                self.world.stats.given_up += 1
                self.distrust()
                self.world.faults.give_up(self.world, self.rank)
                return
        raise Violation(f"rank {self.rank} makes passes without end: {self.core!r}")

    def _run(self) -> None:
        while self.core.stop_reason is None:
            pauses = self.host.pauses
            self.loop.turn()
            if self.host.pauses == pauses:
                self.host.sleep(0.0)

    def _watch(self) -> bool:
        """Do what the watchdog does at its polls; return whether it has ended the process."""
        now_s, hangs = self.host.now_ns() * 1e-9, bool(self.engine.launched)
        if (lost := self.loss.look(now_s)) is not None:
            self._abort(lost)
        self.progress.look(now_s)
        if not (self.loss.is_stuck(now_s) or self.progress.is_stuck):
            return False
        # A device may hang with a peer that is gone. A loop that waits for a dead peer cannot greet
        # a new coordinator, which would tell of it.
        if not (hangs or self.session.awaits_hello or not self.session.is_open):
            raise Violation(f"rank {self.rank} makes no progress: {self.core!r}")
        self.world.say(f"rank {self.rank} is stuck: {self.core!r}")
        self.world.stats.stuck += 1
        self.world.faults.give_up(self.world, self.rank)
        return True

    def _abort(self, lost: Loss) -> None:
        abort_formation(lost, self.engine.communicators, self.loss.degraded_binding)

    def _overhear(self) -> None:
        unheard, self._unheard = self._unheard, []
        for message in unheard:
            binding = self.loss.heard(message)
            if binding is not None:
                self.engine.communicators.abort(binding.group.ranks, binding.formation)
                self._is_woken = True

    def on_message(self, message: RankDown, number: int = 0, coordinator: int = 0) -> None:
        """Get a message of a coordinator; directives may overtake each other.

        The session's thread never hears an older one after a newer one.
        """
        if isinstance(message, Stop):
            raise Violation(f"rank {self.rank} got the order to stop: {message.reason}")
        if isinstance(message, Directive):
            self._senders[id(message)] = message, coordinator
        if number >= self._newest:
            self._newest = number
            self._unheard.append(message)
        if self.world.now >= self.stopped_until:
            self._overhear()
        self.inbox.put(message)

    def connected(self, link: Session) -> None:
        """Get a new session; what the session before it brought is read before the hello."""
        self.greeted = self.world.cores
        self.session.opened(link)

    def crash(self) -> None:
        """End; tokens under way are lost with the process."""
        self._tokens_out.close()
        self.host.fiber.end()

    def distrust(self) -> None:
        """Let nobody read the memory of this process, which has ended."""
        if self.engine.lost is not None:
            self.engine.lost.distrust()

    # ------------------------------------------------------------------ what it says to others

    def push(self, reply_to: str, batch: TokenBatch, outputs: Sequence[Any]) -> None:
        """See `TokenSink`."""
        tokens = tuple(
            Token(
                span.task,
                span.attempt,
                span.first,
                output.before,
                output.new_token_ids[0],
                span.finished,
            )
            for span, output in zip(batch.spans, outputs, strict=True)
        )
        self.world.push_tokens(self.rank, self._tokens_out, reply_to, tokens)

    # ------------------------------------------------------------------ what the core asks for

    def begins(self, effect: Effect) -> None:
        """Look at an effect before it is done."""
        if isinstance(effect, DeferStep | Reshard):
            self.world.point(self.rank, f"{type(effect).__name__} begins")
        match effect:
            case Leave(binding=binding, group_lost=True):
                self.left_as_lost.add(binding.formation)
            case Leave(binding=binding) if not effect.is_leader:
                self.world.steps.check_nobody_waits_for(self, binding)
            case Join(binding=binding):
                moved_in = self.runtime.leases._moved_in.get(binding.group.lease_key, ())
                self.world.moves.joined(binding, moved_in)
            case Resolve():
                self._resolves(effect)
            case LeadStep() | DeferStep():
                self.leads_since = self.world.now
            case _:
                pass

    def has_done(self, effect: Effect, result: Result) -> None:
        """Look at an effect that was done."""
        if isinstance(effect, SWITCHING):
            self.world.point(self.rank, f"{type(effect).__name__} is done")
        if isinstance(effect, Leave | ForgetSteps):
            is_free = not self.runtime.steps.has_planned
            check(is_free, f"rank {self.rank} has steps of a group that it has given up")
        if isinstance(effect, Serve) and not isinstance(result, StepFailed):
            self._check_bundles(effect.binding)
        if isinstance(effect, Reshard) and not isinstance(result, Overtaken):
            self._copied = effect.directive, self.world.now
            migration = self.runtime.migration
            self.world.stats.failed_moves += migration.has_failed
            early = migration.precopy.held(effect.directive.stage.epoch)
            self.world.stats.precopied += sum(each.slots.size for each in early)
            incoming = migration._pending.incoming if migration._pending is not None else ()
            self.world.stats.built_early += sum(is_built_early(each.request) for each in incoming)

    def _check_bundles(self, binding: Binding) -> None:
        """Check that a leader retains together what a migration has filled: see ADR 0015."""
        group = binding.group
        mode = self.engine.of_width(group.width, group.stages)
        if mode.table is None or mode.scheduler is None:
            return
        leased = self.engine.pages.lease_indices(group.lease_key)
        mixed = set(leased[mode.table._page[leased] == UNMAPPED].tolist())
        apart = mixed.difference(*mode.scheduler._bundles)
        check(not apart, f"rank {self.rank} may free some alone of {apart} in {binding}")

    def _resolves(self, resolve: Resolve) -> None:
        stats, migration = self.world.stats, self.runtime.migration
        if self._copied is not None:
            directive, since = self._copied
            if directive.stage.epoch == resolve.epoch and self.cut_out_at < since:
                _, coordinator = self._senders[id(resolve.directive)]
                self.world.moves.resolved(self, directive, resolve.is_committed, coordinator)
        if resolve.is_committed:
            is_later = resolve.directive.stage.epoch > resolve.epoch
            stats.promised += resolve.is_joined and is_later
            stats.overtaken_moves += not resolve.is_joined
            stats.moved += len(migration.adopted)
            to_be = resolve.directive.target.binding_of(self.rank)
            if to_be is not None and to_be.group.stages > 1:
                stats.moved_to_stages += len(migration.adopted)
        elif migration._pending is not None:
            stats.spoiled_moves += migration._pending.may_be_spoiled

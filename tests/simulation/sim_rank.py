"""A rank's process around the real participant and page pool; only the model is missing."""

import dataclasses
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import (
    Directive,
    Drop,
    GiveBack,
    Place,
    RankDown,
    Report,
    Stop,
    SwitchTimes,
)
from coordinator.protocol.switch_actions import (
    Ack,
    Join,
    Leave,
    Move,
    Park,
    Reshard,
    Resolve,
    Serve,
)
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, Carry, ReturnCause
from tests.simulation.checkers import (
    Violation,
    check,
    check_agreement,
    check_equal,
    check_nothing_waits,
)
from tests.simulation.drift import Probes
from tests.simulation.lenders import check_loans
from tests.simulation.network import Session
from tests.simulation.sim_gateway import Token
from tests.simulation.sim_holdings import Holdings, Ranks
from tests.simulation.sim_moving import Board, Overtaken, SimMoving
from tests.simulation.sim_room import Room
from tests.simulation.sim_words import hello_of, report_of
from tests.simulation.stepping import Begin, LeaveGroup, QueueMessage, Step, StepQueue

if TYPE_CHECKING:
    from tests.simulation.world import World

HEARTBEAT_TICKS = 5
MOVES_AT_ONCE = 12
"""More than a rank can have to do at one safe point."""


class SimRank:
    """One process of one rank."""

    def __init__(
        self,
        world: "World",
        rank: Rank,
        incarnation: int,
        widths: tuple[int, ...],
        cohort: int = 0,
        mailboxes: dict[Rank, Board] | None = None,
    ):
        self.world = world
        self.rank = rank
        self.incarnation = incarnation
        self.participant = SwitchParticipant(rank, incarnation)
        self.holdings = Holdings(rank, world.num_pages[rank], incarnation)
        self.cohort = cohort
        # Those that start together map each other's boards, and no others.
        self.migration = SimMoving(self, {rank: Board()} if mailboxes is None else mailboxes)
        self.deferred: list[Drop | GiveBack] = []
        """Task commands that came during a move."""
        self.cut_out_at = -1
        """When the coordinator last had no place for this rank."""
        self.greeted = 0
        """The coordinator that was told hello last."""
        self.session: Session | None = None
        self.stopped_until = 0
        self.pace = 1  # it acts once in so many ticks
        self.clock_jump_ms = 0
        self.inbox: list[RankDown] = []
        """What arrived while the process stood still."""
        self.widths = widths
        self._tokens_out = Session()
        self.step: Step | None = None
        """The step that this follower is in."""
        self._blocked: Step | None = None
        """The step that this leader has no room for in its queue."""
        self._broken_born = -1
        self.room = Room(self)
        self._times: list[SwitchTimes] = []
        self._report_due = 0
        self._changed = False
        self.probed: Probes = {}
        self.closed: set[Ranks] = set()

    @property
    def clock_ms(self) -> int:
        """This process' own monotonic clock."""
        return self.world.now_ms + 100_000 * (self.rank + 1) + self.clock_jump_ms

    @property
    def is_blocked(self) -> bool:
        return self._blocked is not None

    @property
    def bound(self) -> Ranks:
        return self.participant.binding.group.ranks if self.participant.binding else ()

    def act(self) -> None:
        self._settle()
        self._read_inbox()
        if self._blocked is not None:
            self._unblock(self._blocked)
        if self.migration.under_way is not None:
            self._move_on()
        if self._blocked is None and self.step is None and self.migration.under_way is None:
            self._make_moves()
            self._lead()
            self._follow()
        self._report_if_due()

    def crash(self) -> None:
        """Tokens under way are lost with the process."""
        self._tokens_out.close()

    def _read_inbox(self) -> None:
        unread, self.inbox = self.inbox, []
        for message in unread:
            self._handle(message)

    def _settle(self) -> None:
        if self.step is not None and self.step.is_over:
            if self.step.failed:
                self.come_out(self.step.formation)
            self.step = None
        engine = self.holdings.engine
        while engine is not None and engine.in_flight and engine.in_flight[0].is_over:
            step = engine.in_flight.popleft()
            if step.failed:
                engine.give_up(step)
                engine.drop_steps()
                self.come_out(step.formation)
            else:
                self._push(engine.complete(step, self.world.rng.getrandbits(30)))

    def come_out(self, formation: int) -> None:
        """A step failed because a member died: no step of this formation can succeed any more."""
        self._broken_born = max(self._broken_born, formation)
        self.participant.on_leave(formation)

    @property
    def _is_broken(self) -> bool:
        return (
            self.participant.binding is not None
            and self.participant.binding.formation <= self._broken_born
        )

    def _push(self, tokens: list[Token]) -> None:
        engine = self.holdings.engine
        assert engine is not None
        by_gateway: dict[str, list[Token]] = {}
        for token in tokens:
            by_gateway.setdefault(engine.tasks[token.task].header.gateway, []).append(token)
            if token.is_last:
                self.holdings.finish(token.task)
        for gateway, batch in by_gateway.items():
            self.world.push_tokens(self.rank, self._tokens_out, gateway, tuple(batch))

    def _make_moves(self) -> None:
        moves = 0
        while not ((engine := self.holdings.engine) and engine.in_flight):
            check(moves < MOVES_AT_ONCE, f"{self.participant!r} makes moves without end")
            moves += 1
            move = self.participant.next_move(idle=self.holdings.is_idle(self.participant.binding))
            if isinstance(move, Leave) and self._is_broken:
                # Whatever the directive knows: what its last step wrote means nothing.
                move = dataclasses.replace(move, group_lost=True)
            if move is None:
                check_nothing_waits(self.participant)
            if move is None or not self._carry_out(move):
                return
            self._made(move)

    def _made(self, move: Move) -> None:
        self.participant.made(move)
        self.world.note(self.rank, move)
        self._changed = True
        if isinstance(move, Leave) or (isinstance(move, Resolve) and not move.is_joined):
            # Before another group of these ranks is joined: what it keeps is told as of that one.
            self.migration.hear_of_leases(move.directive)
        if isinstance(move, Resolve):
            deferred, self.deferred = self.deferred, []
            for message in deferred:
                self._obey(message)

    def _move_on(self) -> None:
        """Go on with a move that takes many ticks."""
        try:
            done = self.migration.advance()
        except Overtaken:
            return
        if done is not None:
            self._made(done)

    def _is_overtaken(self) -> bool:
        move, wanted = self.migration.under_way, self.participant.wanted
        assert move is not None and wanted is not None
        return wanted.stage.epoch > move.directive.stage.epoch

    def _carry_out(self, move: Move) -> bool:
        """Do what the seat says; False if it cannot be done yet."""
        match move:
            case Leave():
                return self._leave(move)
            case Join(binding, directive):
                self.holdings.join(binding, dict(directive.members))
                self.migration.group = None
                self.world.moves.joined(binding, self.holdings.moved_in(binding.group.ranks))
                self._times.append(SwitchTimes(directive.stage.epoch, swap_us=1_000))
                return True
            case Serve():
                return not self.participant.is_leader or self._serve(move)
            case Reshard():
                self.migration.start(move, self._is_overtaken)
                return False
            case Resolve():
                self.migration.resolve(move)
                return True
            case Park() | Ack():
                return True

    def _leave(self, move: Leave) -> bool:
        binding = move.binding
        if not move.is_leader:
            if not self._is_broken and self._queue(binding).has_unread(self.rank):
                return False
            self.world.steps.check_nobody_waits_for(self, binding)
            self._left(move)
            return True
        has_room = binding.group.width == 1 or self._queue(binding).has_room
        if not has_room and not move.group_lost:
            return False
        self.holdings.not_joined()
        self.holdings.park(binding, move.carry, lost=move.group_lost)
        kept = self._kept(move)
        self._tell(binding, LeaveGroup(binding.formation, kept))
        if kept is not None:
            self.holdings.left(binding.group.ranks, kept)
        self._left(move)
        self._times.append(SwitchTimes(move.directive.stage.epoch, park_us=2_000))
        return True

    def _kept(self, move: Leave) -> frozenset[int] | None:
        if move.carry is Carry.RESHARD and not move.group_lost:
            return None
        kept = self.holdings.kept.get(move.binding.group.ranks)
        return frozenset(kept.indices) if kept is not None else None

    def _left(self, move: Leave) -> None:
        self.holdings.not_joined()
        if move.carry is Carry.RESHARD and not move.group_lost:
            self.migration.on_leave(move.binding, move.directive.stage.epoch)

    def _serve(self, move: Serve) -> bool:
        if move.binding.group.width > 1:
            kept = self.holdings.kept_still(move.retention)
            told = move.grant_pages, kept, self.holdings.version_of(move.binding.group.ranks)
            begin = Begin(move.binding.formation, *told)
            if not self._tell(move.binding, begin):
                return False
            self.holdings.begin(move.binding, begin)
        self.holdings.serve(move.binding, move.grant_pages)
        self.probed |= self.world.drift.probe(self.world, move)
        return True

    def _tell(self, binding: Binding, message: QueueMessage) -> bool:
        """Tell the followers, if there is room in the queue."""
        if binding.group.width == 1:
            return True
        queue = self._queue(binding)
        if has_room := queue.has_room:
            queue.put(message)
        return has_room

    def _queue(self, binding: Binding) -> StepQueue:
        return self.world.memory.queue(binding.group.ranks)

    def _lead(self) -> None:
        engine, wanted = self.holdings.engine, self.participant.wanted
        if engine is None or self._is_broken or not self.participant.may_step(self.clock_ms):
            return
        is_asked = wanted is not None and wanted.stage > self.participant.stage
        if len(engine.in_flight) >= (1 if is_asked else self.world.steps_ahead):
            return
        if step := engine.plan():
            self._send(step)

    def _send(self, step: Step) -> None:
        engine = self.holdings.engine
        assert engine is not None
        if not self._tell(step.binding, step):
            self._blocked = step
            return
        self._blocked = None
        self.world.steps.check_may_start(self, step)
        check_loans(self.world, self, step.binding.group)
        self.holdings.execute(step)
        step.arrived.add(self.rank)
        engine.in_flight.append(step)

    def _unblock(self, step: Step) -> None:
        if self._is_broken or not self.participant.may_step(self.clock_ms):
            assert self.holdings.engine is not None
            self.holdings.engine.give_up(step)
            self._blocked = None
        else:
            self._send(step)

    def _follow(self) -> None:
        binding = self.participant.binding
        if binding is None:
            if self.participant.may_drain:
                self._drain()
            return
        if not self.participant.is_follower:
            return
        message = self._queue(binding).take(self.rank)
        match message:
            case None:
                return
            case LeaveGroup(formation, kept):
                self.participant.on_leave(formation, for_move=kept is None)
                if formation == binding.formation and kept is not None:
                    self.holdings.left(binding.group.ranks, kept)
            case Begin(formation) if formation == binding.formation:
                self.holdings.begin(binding, message)
                self._changed = True
            case Step() if message.formation == binding.formation and not self._is_broken:
                check_agreement(message.binding, binding, self.rank)
                ranks = binding.group.ranks
                check_equal(f"lease indices in {ranks}", self.holdings.table(ranks), message.table)
                self.holdings.execute(message)
                message.arrived.add(self.rank)
                self.step = message

    def _drain(self) -> None:
        """Joined to nothing: read and drop what is left on the queues of all groups."""
        for queue in self.world.memory.queues_of(self.rank):
            while (message := queue.take(self.rank)) is not None:
                if isinstance(message, LeaveGroup):
                    self.participant.on_leave(message.formation)

    def on_message(self, message: RankDown) -> None:
        if self.world.now < self.stopped_until or self.inbox:
            self.inbox.append(message)
        else:
            self._handle(message)

    def _handle(self, message: RankDown) -> None:
        match message:
            case Directive():
                self._on_directive(message)
            case Place():
                self.holdings.place(message)
            case Drop() | GiveBack():
                if self.defers:
                    self.deferred.append(message)
                else:
                    self._obey(message)
            case Stop(reason):
                raise Violation(f"rank {self.rank} was told to stop: {reason}")

    @property
    def defers(self) -> bool:
        """What is told of a move must stay true until its end."""
        return self.participant.is_moving

    def _obey(self, message: Drop | GiveBack) -> None:
        match message:
            case Drop(task_id, attempt):
                self.holdings.take_out(task_id, self.bound, attempt)
            case GiveBack(task_id):
                if task := self.holdings.take_out(task_id, self.bound):
                    self.holdings.give_back(task, ReturnCause.RECOMPUTE)

    def _on_directive(self, directive: Directive) -> None:
        self.participant.on_directive(directive)
        if directive.incarnation != self.incarnation:
            return
        self.migration.hear_of_leases(directive)

    def connected(self, session: Session) -> None:
        """A new session: say who this is and what it holds; earlier task events are lost.

        What the session before it brought is read first, or the hello would not tell of it.
        """
        self._read_inbox()
        self.session = session
        self.greeted = self.world.cores
        self.holdings.ended.clear()
        self.holdings.returned.clear()
        self.world.rank_says(self, session, hello_of(self))
        self.world.rank_says(self, session, self._report())

    def _report_if_due(self) -> None:
        is_due = self.world.now >= self._report_due
        if not (is_due or self._changed or self.holdings.changed):
            return
        if is_due:
            self._report_due = self.world.now + HEARTBEAT_TICKS
        self._changed = self.holdings.changed = False
        if self.session is not None and self.session.is_open:
            self.world.rank_says(self, self.session, self._report())

    def _report(self) -> Report:
        report = report_of(self, self._times)
        for told in (self.holdings.ended, self.holdings.returned, self._times):
            told.clear()
        return report

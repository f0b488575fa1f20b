"""A rank's process around the real `Seat` and the real `PagePool`; only the model is missing."""

from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Binding,
    Carry,
    Directive,
    Drop,
    EndCause,
    GiveBack,
    HeldTask,
    LeaseKept,
    PageReport,
    Place,
    RankDown,
    RankHello,
    Report,
    ReturnCause,
    SwitchTimes,
    TaskEnded,
    TaskId,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.seat import Ack, Join, Leave, Move, OweLeave, Park, Seat, Serve
from kvadaptor.pages import PagePool
from tests.simulation.checkers import check, check_agreement, check_equal
from tests.simulation.network import Session
from tests.simulation.sim_engine import BLOCK_TOKENS, KV_HEADS, SimEngine, SimTask, slots_of
from tests.simulation.sim_gateway import Token
from tests.simulation.stepping import Begin, LeaveGroup, QueueMessage, Step, StepQueue

if TYPE_CHECKING:
    from tests.simulation.world import World

Ranks = tuple[Rank, ...]

HEARTBEAT_TICKS = 5


class SimRank:
    """One process of one rank."""

    def __init__(self, world: "World", rank: Rank, incarnation: int, widths: tuple[int, ...]):
        self.world = world
        self.rank = rank
        self.incarnation = incarnation
        self.widths = widths
        self.seat = Seat(rank, incarnation)
        self.pages = PagePool(world.num_pages)
        self.own: set[int] = set()
        self.session: Session | None = None
        self.tokens_out = Session()
        self.engine: SimEngine | None = None
        self.paused: dict[Ranks, dict[TaskId, SimTask]] = {}
        self.kept: dict[Ranks, LeaseKept] = {}
        self.applied: dict[Ranks, tuple[int, int]] = {}
        self.members: dict[Ranks, tuple[tuple[Rank, int | None], ...]] = {}
        self.joined: dict[Ranks, int] = {}
        self.version = 0
        self.step: Step | None = None
        self.blocked: Step | None = None
        self.broken_born = -1
        self.ended: list[TaskEnded] = []
        self.returned: list[TaskReturned] = []
        self.times: list[SwitchTimes] = []
        self.report_due = 0
        self.changed = False
        self.stopped_until = 0
        self.inbox: list[RankDown] = []
        """What arrived while the process stood still."""

    @property
    def clock_ms(self) -> int:
        """This process' own monotonic clock."""
        return self.world.now_ms + 100_000 * (self.rank + 1)

    # ------------------------------------------------------------------ one pass of its loop

    def act(self) -> None:
        self._settle()
        self._read_inbox()
        if self.blocked is not None:
            self._unblock()
        if self.blocked is None and self.step is None:
            self._make_moves()
            self._lead()
            self._follow()
        self._report_if_due()

    def _read_inbox(self) -> None:
        unread, self.inbox = self.inbox, []
        for message in unread:
            self._handle(message)

    def _settle(self) -> None:
        if self.step is not None and self.step.is_over:
            if self.step.failed:
                self._break(self.step.born)
            self.step = None
        engine = self.engine
        while engine is not None and engine.in_flight and engine.in_flight[0].is_over:
            step = engine.in_flight.popleft()
            if step.failed:
                engine.give_up(step)
                while engine.in_flight:
                    engine.give_up(engine.in_flight.popleft())
                self._break(step.born)
            else:
                self._push(engine.complete(step, self.world.rng.getrandbits(30)))

    def _break(self, born: int) -> None:
        """A step failed because a member died: no step of this formation can succeed any more."""
        self.broken_born = max(self.broken_born, born)
        self.seat.on_leave(born)

    def _is_broken(self) -> bool:
        return self.seat.binding is not None and self.seat.binding.born <= self.broken_born

    def _push(self, tokens: list[Token]) -> None:
        engine = self.engine
        assert engine is not None
        by_gateway: dict[str, list[Token]] = {}
        for token in tokens:
            by_gateway.setdefault(engine.tasks[token.task].header.gateway, []).append(token)
            if token.is_last:
                task = engine.remove(token.task)
                assert task is not None
                done = TaskEnded(token.task, token.attempt, EndCause.FINISHED, task.length)
                self.ended.append(done)
                self.changed = True
        for gateway, batch in by_gateway.items():
            self.world.push_tokens(self.tokens_out, gateway, tuple(batch))

    # ------------------------------------------------------------------ moves

    def _make_moves(self) -> None:
        while self.engine is None or not self.engine.in_flight:
            move = self.seat.next_move(idle=self.engine is None or not self.engine.tasks)
            if move is None or not self._carry_out(move):
                return
            self.seat.made(move)
            self.world.note(self.rank, move)
            self.changed = True

    def _carry_out(self, move: Move) -> bool:
        """Do what the seat says; False if it cannot be done yet."""
        match move:
            case Leave():
                return self._leave(move)
            case OweLeave(binding):
                return self._tell(self._queue(binding), LeaveGroup(binding.born))
            case Join(binding, directive):
                ranks = binding.group.ranks
                incarnations = dict(directive.members)
                self.members[ranks] = tuple((each, incarnations.get(each)) for each in ranks)
                self.joined[ranks] = binding.born
                self.times.append(SwitchTimes(directive.stage.epoch, swap_us=1_000))
                return True
            case Serve():
                return not self.seat.is_leader or self._serve(move)
            case Park() | Ack():
                return True

    def _leave(self, move: Leave) -> bool:
        binding = move.binding
        if not move.is_leader:
            if not self._is_broken() and self._queue(binding).has_unread(self.rank):
                return False
            self.world.check_nobody_waits_for(self, binding)
            return True
        if binding.group.width > 1 and not self._is_broken():
            queue = self._queue(binding)
            if queue.has_room:
                queue.put(LeaveGroup(binding.born))
            elif not move.group_lost:
                return False
        self._park(binding, move.carry, lost=move.group_lost)
        self.times.append(SwitchTimes(move.directive.stage.epoch, park_us=2_000))
        return True

    def _park(self, binding: Binding, carry: Carry, *, lost: bool) -> None:
        ranks = binding.group.ranks
        paused = self.paused.setdefault(ranks, {})
        tasks = list(self.engine.tasks.values()) if self.engine else []
        self.engine = None
        for task in tasks:
            if task.blocks and carry is Carry.PAUSE and not lost:
                paused[task.header.task] = task
            else:
                has_kv = bool(task.blocks)
                self._return(task, ReturnCause.RECOMPUTE if has_kv else ReturnCause.NOT_STARTED)
        if lost:
            self._return_paused(ranks, frozenset())
        self._withdraw(ranks)

    def _withdraw(self, ranks: Ranks) -> None:
        """Give up what the paused tasks of an unbound group do not need."""
        blocks = {block for task in self.paused[ranks].values() for block in task.blocks}
        if len(ranks) == 1:
            self.pages.return_own(self.own - blocks)
            self.own &= blocks
            return
        slots = slots_of(len(ranks))
        indices = tuple(sorted({block // slots for block in blocks}))
        self.version += 1
        self.kept[ranks] = LeaseKept(ranks, self.version, indices, self.joined[ranks])
        self.changed = True

    def _serve(self, move: Serve) -> bool:
        binding = move.binding
        if binding.group.width > 1:
            begin = Begin(binding.born, move.grant_pages, move.kept)
            if not self._tell(self._queue(binding), begin):
                return False
            self._begin(binding, begin)
            indices = frozenset(self.pages.lease_table(binding.group.ranks))
        else:
            self.own.update(self.pages.grant_own(move.grant_pages))
            indices = frozenset(self.own)
        self.engine = SimEngine(binding, indices)
        for task in self.paused.pop(binding.group.ranks, {}).values():
            if not self.engine.resume(task):
                self._return(task, ReturnCause.RECOMPUTE)
        return True

    def _begin(self, binding: Binding, begin: Begin) -> None:
        ranks = binding.group.ranks
        kept = begin.kept.indices if begin.kept is not None else ()
        missing = set(kept).difference(self.pages.lease_table(ranks))
        check(not missing, f"rank {self.rank} has no pages for kept {missing} of {ranks}")
        self.pages.keep_only(ranks, kept)
        self.pages.lease(ranks, self.grant_of(begin))
        self.applied[ranks] = (binding.born, -1)
        self.kept.pop(ranks, None)

    def grant_of(self, begin: Begin) -> int:
        return begin.grant_pages

    def _tell(self, queue: StepQueue, message: QueueMessage) -> bool:
        if not queue.has_room:
            return False
        queue.put(message)
        return True

    def _queue(self, binding: Binding) -> StepQueue:
        return self.world.queue(binding.group.ranks)

    # ------------------------------------------------------------------ steps

    def _lead(self) -> None:
        engine = self.engine
        if engine is None or self._is_broken() or not self.seat.may_step(self.clock_ms):
            return
        wanted = self.seat.wanted
        is_asked = wanted is not None and wanted.stage > self.seat.stage
        if len(engine.in_flight) >= (1 if is_asked else self.world.steps_ahead):
            return
        if batch := engine.plan():
            self._send(Step(engine.binding, engine.table, batch))

    def _send(self, step: Step) -> None:
        engine = self.engine
        assert engine is not None
        if step.binding.group.width > 1:
            if not self._queue(step.binding).has_room:
                self.blocked = step
                return
            self._queue(step.binding).put(step)
        self.world.check_may_start(self, step)
        step.arrived.add(self.rank)
        engine.in_flight.append(step)

    def _unblock(self) -> None:
        step = self.blocked
        assert step is not None and self.engine is not None
        if self._is_broken() or not self.seat.may_step(self.clock_ms):
            self.engine.give_up(step)
            self.blocked = None
        elif self._queue(step.binding).has_room:
            self.blocked = None
            self._send(step)

    def _follow(self) -> None:
        binding = self.seat.binding
        if binding is None:
            self._drain()
            return
        if not self.seat.is_follower:
            return
        message = self._queue(binding).take(self.rank)
        match message:
            case None:
                return
            case LeaveGroup(born):
                self.seat.on_leave(born)
            case Begin(born) if born == binding.born:
                self._begin(binding, message)
                self.changed = True
            case Step() if message.born == binding.born and not self._is_broken():
                check_agreement(message.binding, binding, self.rank)
                table = frozenset(self.pages.lease_table(binding.group.ranks))
                check_equal(f"lease indices in {binding.group.ranks}", table, message.table)
                message.arrived.add(self.rank)
                self.step = message

    def _drain(self) -> None:
        """Joined to nothing: read and drop what is left on the queues of all groups."""
        for queue in self.world.queues_of(self.rank):
            while (message := queue.take(self.rank)) is not None:
                if isinstance(message, LeaveGroup):
                    self.seat.on_leave(message.born)

    # ------------------------------------------------------------------ messages

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
                self._on_place(message)
            case Drop(task_id):
                self._take_out(task_id)
            case GiveBack(task_id):
                if task := self._take_out(task_id):
                    self._return(task, ReturnCause.RECOMPUTE)
            case _:
                check(False, f"rank {self.rank} was told to stop: {message}")

    def _on_directive(self, directive: Directive) -> None:
        self.seat.on_directive(directive)
        if directive.incarnation != self.incarnation:
            return
        for kept in directive.kept:
            self._apply(kept)
        if self.seat.wanted is directive and directive.stage.epoch > 0:
            self._forget_lost(dict(directive.members))

    def _is_bound(self, ranks: Ranks) -> bool:
        return self.seat.binding is not None and self.seat.binding.group.ranks == ranks

    def _apply(self, kept: LeaseKept) -> None:
        order = (kept.born, kept.version)
        if self._is_bound(kept.ranks) or order < self.applied.get(kept.ranks, (0, 0)):
            return
        self.applied[kept.ranks] = order
        own = self.kept.get(kept.ranks)
        if own is not None and order >= (own.born, own.version) and kept.indices != own.indices:
            self._return_paused(kept.ranks, frozenset(kept.indices))
            self._withdraw(kept.ranks)
        table = self.pages.lease_table(kept.ranks)
        self.pages.keep_only(kept.ranks, [index for index in kept.indices if index in table])

    def _forget_lost(self, present: dict[Rank, int]) -> None:
        """Leases that a lost process had a share in are worth nothing."""
        for ranks, members in list(self.members.items()):
            if self._is_bound(ranks) or all(present.get(each) == inc for each, inc in members):
                continue
            del self.members[ranks]
            self.pages.keep_only(ranks, ())
            if self.paused.get(ranks):
                self._return_paused(ranks, frozenset())
                self._withdraw(ranks)

    def _on_place(self, place: Place) -> None:
        header = place.header
        task = SimTask(header, place.attempt, place.payload[0], list(place.generated_tokens))
        if self.engine is None or self.engine.binding != place.binding:
            self._return(task, ReturnCause.STALE)
            return
        check(header.task not in self._held(), f"rank {self.rank} already has {header.task}")
        self.engine.tasks[header.task] = task

    def _take_out(self, task_id: TaskId) -> SimTask | None:
        if self.engine is not None and (task := self.engine.remove(task_id)):
            return task
        for ranks, tasks in self.paused.items():
            if task_id in tasks:
                task = tasks.pop(task_id)
                if not self._is_bound(ranks):
                    self._withdraw(ranks)
                return task
        return None

    def _return_paused(self, ranks: Ranks, indices: frozenset[int]) -> None:
        """Return the paused tasks that need other lease indices than these."""
        slots = slots_of(len(ranks))
        tasks = self.paused.get(ranks, {})
        for task in list(tasks.values()):
            if not indices.issuperset(block // slots for block in task.blocks):
                del tasks[task.header.task]
                self._return(task, ReturnCause.RECOMPUTE)

    def _return(self, task: SimTask, cause: ReturnCause) -> None:
        tokens = tuple(task.tokens)
        self.returned.append(TaskReturned(task.header.task, task.attempt, cause, tokens))
        self.changed = True

    def _held(self) -> dict[TaskId, tuple[SimTask, Ranks, bool]]:
        held = {
            task_id: (task, ranks, True)
            for ranks, tasks in self.paused.items()
            for task_id, task in tasks.items()
        }
        if self.engine is not None:
            ranks = self.engine.binding.group.ranks
            held |= {each: (task, ranks, False) for each, task in self.engine.tasks.items()}
        return held

    # ------------------------------------------------------------------ reports

    def connected(self, session: Session) -> None:
        """A new session: say who this is and what it holds; earlier task events are lost.

        What the session before it brought is read first, or the hello would not tell of it.
        """
        self._read_inbox()
        self.session = session
        self.ended.clear()
        self.returned.clear()
        hello = RankHello(
            version=PROTOCOL_VERSION,
            rank=self.rank,
            incarnation=self.incarnation,
            pid=self.rank,
            device="sim",
            widths=self.widths,
            max_tasks=8,
            max_model_len_tokens=64,
            tokens_per_slot=BLOCK_TOKENS,
            kv_heads=KV_HEADS,
            pages_total=self.world.num_pages,
            held=tuple(
                HeldTask(
                    task.header,
                    task.attempt,
                    self.world.group(ranks),
                    len(task.tokens),
                    is_paused,
                )
                for task, ranks, is_paused in self._held().values()
            ),
        )
        self.world.rank_says(self, session, hello)
        self.world.rank_says(self, session, self._report())

    def _report_if_due(self) -> None:
        is_due = self.world.now >= self.report_due
        if not is_due and not self.changed:
            return
        if is_due:
            self.report_due = self.world.now + HEARTBEAT_TICKS
        self.changed = False
        if self.session is not None and self.session.is_open:
            self.world.rank_says(self, self.session, self._report())

    def _report(self) -> Report:
        counts = self.pages.counts()
        engine = self.engine
        report = Report(
            rank=self.rank,
            incarnation=self.incarnation,
            sent_at_ms=self.clock_ms,
            stage=self.seat.stage,
            binding=self.seat.binding,
            target=self.seat.target,
            pages=PageReport(
                counts.total, counts.free, counts.owned, sum(counts.leased.values())
            ),
            running=len(engine.tasks) if engine else 0,
            blocks_free=len(engine.free) if engine else 0,
            blocks_total=engine.blocks_total if engine else 0,
            kept=tuple(self.kept.values()),
            ended=tuple(self.ended),
            returned=tuple(self.returned),
            progress=tuple(
                TaskProgress(task_id, len(task.tokens), is_paused)
                for task_id, (task, _, is_paused) in self._held().items()
            ),
            times=tuple(self.times),
        )
        self.ended.clear()
        self.returned.clear()
        self.times.clear()
        return report

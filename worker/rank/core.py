"""Decides what a rank does next; owns its participant, runtime, steps and migration.

The core gets events and returns effects; it waits for nothing and asks no clock. Where one effect
depends on the result of another, a generator yields the first and receives its result. At a safe
point no generator is alive. The shell is `worker.rank.loop`.

A rank whose group has lost a member aborts the formation and stays alive. The in-flight step does
not count. A leader returns its tasks at once, with the tokens already delivered, and plans no
further step; a follower executes none. Both then wait for the directive that forms groups without
the lost rank. A rank whose step runs out of device memory does the same, even when alone: it aborts
the formation for its peers and reports it, and the coordinator ejects the rank for a while.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar, assert_never

import structlog

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, Drop, GiveBack, Place, Report, Stop
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
from coordinator.protocol.switch_participant import KEEPING, SwitchParticipant
from coordinator.protocol.terms import Binding, Carry, ReturnCause
from worker.io.session import HelloWanted
from worker.io.step_queue import FOLLOWER_POLL_S, Begin, LeaveGroup
from worker.rank.departure import Departure
from worker.rank.engine import Engine, NoRoomError
from worker.rank.events import (
    CopiedEarly,
    CopiesDone,
    CopyEarly,
    DeferStep,
    DetachedStepEnded,
    DrainQueues,
    Effect,
    EndPreCopy,
    Event,
    FinishStep,
    Follow,
    ForgetSteps,
    LeadStep,
    Obey,
    Overtaken,
    Prepare,
    Prepared,
    Probe,
    Publish,
    QueueRead,
    QueuesDrained,
    Result,
    SendHello,
    SendReport,
    StepFailed,
    StepFinished,
    Tick,
    Wait,
)
from worker.rank.quarantine_probe import QuarantineProbe
from worker.rank.reports import Reports, hello_of
from worker.rank.runtime import GroupRuntime
from worker.rank.switch_clock import SwitchClock

log = structlog.get_logger()

IDLE_WAIT_S = 0.05
"""Maximum wait for the inbox when there is no step to run."""

DETACHED_POLL_S = 0.0003
"""The same while a detached step is in flight or peers' mailboxes are awaited."""

STEP_ERRORS = PeerLostError, NoRoomError

T = TypeVar("T")

Procedure = Generator[Effect, Result, T]
"""Yields effects, one by one, and receives their results."""


class RankCore:
    """The state of one incarnation of one rank."""

    def __init__(
        self,
        engine: Engine,
        runtime: GroupRuntime,
        participant: SwitchParticipant,
        heartbeat_s: float,
        *,
        probes_after_switch: bool = False,
    ) -> None:
        self.engine = engine
        self.runtime = runtime
        self.participant = participant
        self.stop_reason: str | None = None
        """Why the rank is to end; None: it goes on."""
        self.probing = QuarantineProbe(engine, after_switch=probes_after_switch)
        self._rank: Rank = engine.spec.rank
        self._steps = runtime.steps
        self._communicators = engine.communicators
        self._leaving = Departure(runtime, engine.spec.rank)
        self._clock = SwitchClock()
        self._leases = runtime.leases
        self._reports = Reports(engine, runtime, participant, heartbeat_s)
        self._procedures: list[Procedure[None]] = []
        """The procedures that wait for a result; the last one waits for the next one."""
        self._lead = LeadStep(0)
        """The last one, as most passes of an epoch ask for the same."""
        self._now_ns = 0
        self._pending_commands: list[Drop | GiveBack] = []
        """Task commands received during a migration."""
        self._moved_with: Directive | None = None
        """The directive of the last migration; it names the processes that took part."""
        self._no_room = 0
        """The last formation in which a step ran out of memory."""
        self._reported_no_room = 0

    def __repr__(self) -> str:
        """Return the participant's state, tasks, last step and pages in one line."""
        tasks = " ".join(led.header.task for led in self.runtime.book)
        parts = [repr(self.participant)[1:-1], f"tasks {tasks}" if tasks else "no tasks"]
        if self._steps.has_deferred_step:
            parts.append("its step deferred")
        elif self._steps.has_inflight:
            parts.append(f"its step {'detached' if self._steps.has_detached_step else 'in flight'}")
        parts += [f"{type(each).__name__} {each.task} pending" for each in self._pending_commands]
        if self.is_in_aborted_formation:
            parts.append("formation aborted")
        if self.stop_reason is not None:
            parts.append(f"stops: {self.stop_reason}")
        return f"<{', '.join(parts)}, {self.engine.pages!r}>"

    def handle(self, event: Event, now_ns: int) -> Effect | None:
        """Take an event in; return what to do now, or None until the next event.

        The shell does the effect, then hands in its `Result`; other events may come before that.
        `now_ns` is the time of the host's monotonic clock. Raises the error of a step that does not
        belong to the joined formation: the process has to end.
        """
        self._now_ns = now_ns
        match event:
            case Result():
                return self._resume(event)
            case Tick():
                return self._begin(self._pass())
            case CopiesDone(epoch=epoch, seconds=seconds, link_bytes=link_bytes):
                self._clock.copied(epoch, seconds, link_bytes)
                self._reports.has_news = True
            case DetachedStepEnded(ended_ns=ended_ns):
                self._clock.quiesced(ended_ns)
                self._reports.has_news = True
            case Directive():
                if event.precopy is None:
                    self._clock.wanted(event.stage.epoch, now_ns)
                self.participant.on_directive(event)
                self._reports.has_news |= self._leases.hear(event, self.participant)
            case Place():
                self.runtime.place(event, self.participant.binding)
                self._reports.has_news |= bool(self.runtime.returned or self.runtime.ended)
            case Drop() | GiveBack() if self.participant.is_moving:
                # The published manifest must stay true.
                self._pending_commands.append(event)
            case Drop() | GiveBack():
                return self._begin(self._obey(event))
            case HelloWanted():
                return self._begin(self._greet())
            case Stop(reason=reason):
                self.stop_reason = reason
            case _:
                assert_never(event)
        return None

    def _begin(self, procedure: Procedure[None]) -> Effect | None:
        effect = next(procedure, None)
        if effect is not None:
            self._procedures.append(procedure)
        return effect

    def _resume(self, result: Result) -> Effect | None:
        procedure = self._procedures.pop()
        try:
            if isinstance(result, StepFailed):
                effect = procedure.throw(result.error)
            else:
                effect = procedure.send(result)
        except StopIteration:
            return None
        self._procedures.append(procedure)
        return effect

    # ------------------------------------------------------------------ a pass

    def _pass(self) -> Procedure[None]:
        last = None
        if self.runtime.migration.precopy.concerns(self.participant):
            yield from self._copy_early()
        if (move := self._due_move()) is not None:
            last = yield from self._make_moves(move)
        participant, runtime = self.participant, self.runtime
        is_lost, has_worked = self.is_in_aborted_formation, last is not None
        if is_lost and participant.binding is not None:
            # A follower no longer needs its leader's leave message.
            participant.on_leave(participant.binding.formation)
        if not is_lost and participant.may_step(self._now_ms) and runtime.has_work:
            # No generator of its own: this is the path of every step.
            epoch, count = participant.stage.epoch, self._steps.count
            if self._lead.epoch != epoch:
                self._lead = LeadStep(epoch)
            try:
                self._on_step((yield self._lead), count)
            except STEP_ERRORS as error:
                yield from self._abort(error)
                self._reports.has_news = True
            runtime.tidy_some()
            has_worked = True
        else:
            if last is not None and not isinstance(last, Serve) and self._is_report_due:
                # All ranks wait for this report, and a follower may next block on its leader.
                yield SendReport(self._take_report())
            has_worked |= yield from self._read_queues(is_lost=is_lost)
        if self._is_report_due:
            yield SendReport(self._take_report())
        if not has_worked and self.stop_reason is None:
            yield from self._wait()

    def _read_queues(self, *, is_lost: bool) -> Procedure[bool]:
        """Read what leaders send; return whether that was a wait for the rank's own leader."""
        participant = self.participant
        if participant.is_follower and not participant.has_leave and not is_lost:
            if not (yield from self._follow(self._poll_s(FOLLOWER_POLL_S))):
                self.runtime.tidy_some()
            return True
        if participant.may_drain:
            drained = yield DrainQueues()
            assert isinstance(drained, QueuesDrained)
            for formation in drained.formations:
                participant.on_leave(formation)
        return False

    def _copy_early(self) -> Procedure[None]:
        """Copy some KV while the group serves, or end that; no leader without a time lease does."""
        participant, wanted = self.participant, self.participant.wanted
        is_sure = not participant.is_leader or participant.may_step(self._now_ms)
        if wanted is None or not is_sure or self.is_in_aborted_formation:
            return
        epoch = self.runtime.migration.precopy.epoch  # 0: none. A new coordinator may use it again.
        is_wanted = wanted.stage.epoch == epoch and wanted.carry is Carry.RESHARD
        if epoch and (participant.stays or not is_wanted):
            yield from self._guarded(EndPreCopy())
        elif participant.precopy is not None and not participant.has_leave:
            copied = yield from self._guarded(CopyEarly(wanted))
            self._reports.has_news |= isinstance(copied, CopiedEarly) and copied.ends_round

    def _wait(self) -> Procedure[None]:
        participant = self.participant
        prepared = yield Prepare(participant.wanted if participant.is_moving else None)
        assert isinstance(prepared, Prepared)
        if participant.serving or (participant.binding is None and not participant.is_moving):
            # While a rank is migrating or joined to a group, others wait for it.
            self.runtime.tidy()
        yield Wait(self._poll_s(DETACHED_POLL_S if prepared.awaits_peers else IDLE_WAIT_S))

    def _poll_s(self, otherwise_s: float) -> float:
        migration = self.runtime.migration
        is_draining = self._steps.has_detached_step or migration.is_quiescing
        # A follower of a busy group goes on after each step anyway.
        is_draining |= migration.precopy.is_busy and not self.participant.is_follower
        return DETACHED_POLL_S if is_draining else otherwise_s

    @property
    def _now_ms(self) -> int:
        return self._now_ns // 1_000_000

    def _greet(self) -> Procedure[None]:
        # The session repeats the last report right after the hello. A new coordinator must not take
        # an older one for true: this rank may have heard of a commit since, and its next action may
        # block it for long.
        yield SendReport(self._take_report())
        own = self.engine, self.runtime, self.participant
        yield SendHello(hello_of(*own, self._pending_commands))

    def _obey(self, command: Drop | GiveBack) -> Procedure[None]:
        # A void step ends its own group alone; the task may be paused in another.
        yield from self._guarded(FinishStep())
        yield from self._guarded(Obey(command))
        self._reports.has_news = True

    # ------------------------------------------------------------------ the participant's actions

    def _due_move(self) -> Move | None:
        """Return the action to take at this safe point, or None."""
        if self.stop_reason is not None:
            return None
        is_lost = self.is_in_aborted_formation  # Then no task of the group will ever end.
        move = self.participant.next_move(idle=is_lost or not self.runtime.has_work)
        return replace(move, group_lost=True) if isinstance(move, Leave) and is_lost else move

    def _make_moves(self, move: Move | None) -> Procedure[Move | None]:
        """Carry out this action and all that follow it; return the last one."""
        last = None
        while move is not None:
            if isinstance(move, Leave):
                if self.is_in_aborted_formation:
                    yield ForgetSteps(move.binding)
                leaving, has_deferred_step = self._leaving, self._steps.has_deferred_step
                if not has_deferred_step and leaving.is_put_off(move, self._now_ns):
                    leaving.put_off(move)
                    break
                if self.participant.may_step(self._now_ms) and leaving.may_defer_step(move):
                    leaving.defer_step(move)
                    yield from self._guarded(DeferStep(self.participant.stage.epoch))
                    move = self._due_move()  # The step may have shown that the group is lost.
                    continue
            if (yield from self._carry_out(move)):
                last = move
            move = self._due_move()
        return last

    def _carry_out(self, move: Move) -> Procedure[bool]:
        """Carry out an action; return whether it was made."""
        started_ns = self._now_ns
        match move:
            case Leave():
                yield from self._leave(move)
            case Join(binding=binding, directive=directive):
                yield move
                self._leases.formed(binding.group.lease_key, directive)
            case Serve(binding=binding, directive=directive):
                if binding.group.leader == self._rank:
                    yield from self._serve(move)
            case Reshard(directive=directive):
                if isinstance((yield move), Overtaken):
                    return False
            case Resolve():
                if move.is_committed and self._moved_with is not None:
                    self._share(self._moved_with)
                yield move
            case Park() | Ack():
                pass
            case _:
                assert_never(move)
        self.participant.made(move)
        self._reports.has_news = True
        yield from self._after(move)
        took_us = (self._now_ns - started_ns) // 1000
        ended_ns = None if self._steps.has_detached_step else self._steps.ended_ns
        self._clock.made(move, took_us, ended_ns, self._now_ns)
        return True

    def _leave(self, move: Leave) -> Procedure[None]:
        if move.is_leader:
            # Tasks that keep their KV are parked in their state after the in-flight step.
            if move.group_lost or move.carry not in KEEPING or self._steps.must_end:
                yield from self._guarded(FinishStep())
        else:
            while (yield from self._follow(0.0)):
                pass  # A live leader may be waiting in a step that it has sent.
        yield move

    def _serve(self, move: Serve) -> Procedure[None]:
        binding, directive = move.binding, move.directive
        yield from self._guarded(move)
        if self.is_in_aborted_formation:
            return
        self._clock.begun(is_busy=self.runtime.has_tasks)
        self._clock.leads(directive.stage.epoch)
        if self.probing.is_due(binding, directive):
            yield from self._guarded(Probe(binding, directive))

    def _share(self, directive: Directive) -> None:
        if (binding := directive.target.binding_of(self._rank)) is not None:
            self._leases.formed(binding.group.lease_key, directive)

    def _after(self, move: Move) -> Procedure[None]:
        self._leases.made(move, self.participant)
        match move:
            case Leave(directive=directive) if self.participant.is_moving:
                # While the report travels, peers read here what they plan the migration from.
                yield Publish(directive.stage.epoch, directive.drafted)
            case Reshard(directive=directive):
                self._moved_with = directive
            case Resolve():
                commands, self._pending_commands = self._pending_commands, []
                for command in commands:
                    yield from self._obey(command)
            case _:
                pass

    def is_overtaken(self, directive: Directive) -> bool:
        """Return whether to give up the migration of this directive: another layout is wanted."""
        wanted = self.participant.wanted
        is_old = wanted is not None and wanted.stage.epoch > directive.stage.epoch
        return is_old or self.stop_reason is not None

    # ------------------------------------------------------------------ steps

    def _on_step(self, finished: Result, count: int) -> None:
        """Note that a led step has ended well; `count` steps ran before it."""
        steps, reports = self._steps, self._reports
        assert isinstance(finished, StepFinished)
        if steps.count > count:
            reports.has_news |= self._clock.stepped(steps.started_ns, finished.took_us)
        reports.has_news |= bool(self.runtime.ended)

    def _follow(self, wait_s: float) -> Procedure[bool]:
        """Read a message of the leader; return whether there was one."""
        binding, steps = self.participant.binding, self._steps.count
        assert binding is not None
        read = yield from self._guarded(Follow(binding, wait_s))
        message = read.message if isinstance(read, QueueRead) else None
        if isinstance(message, LeaveGroup):
            self.participant.on_leave(message.formation, for_move=message.lease_indices is None)
        if isinstance(message, Begin):
            self._clock.begun(is_busy=message.is_busy)
        if message is not None and self._steps.count > steps:
            self.runtime.tidy_some()
            self._reports.has_news |= self._clock.stepped(self._steps.started_ns, None)
        return message is not None

    # ------------------------------------------------------------------ aborted formations

    @property
    def oom_formation(self) -> int:
        """The formation in which a step ran out of memory, until the rank serves in a later one.

        A rank may leave and join within one pass while its peers still wait in that step. It serves
        only after the coordinator has received the report of its join, which carries this value.
        """
        participant = self.participant
        has_gone_on = (
            participant.binding is not None and participant.binding.formation > self._no_room
        )
        return 0 if has_gone_on and participant.serving else self._no_room

    @property
    def is_in_aborted_formation(self) -> bool:
        """Whether the rank is joined to an aborted formation: no step of it counts any more."""
        binding = self.participant.binding
        if binding is None:
            return False
        is_aborted = self._communicators.is_aborted(binding.group.ranks, binding.formation)
        return is_aborted or binding.formation == self._no_room

    def _guarded(self, effect: Effect) -> Procedure[Result | None]:
        """Do a part of a step; return None if that aborted the joined formation."""
        try:
            return (yield effect)
        except STEP_ERRORS as error:
            yield from self._abort(error)
            return None

    def _abort(self, error: PeerLostError | NoRoomError) -> Procedure[None]:
        """Abort the joined formation, as a part of its step has failed.

        Raises the error if it belongs to an earlier formation.
        """
        binding = self.participant.binding
        if binding is None:
            raise error
        group = binding.group
        if isinstance(error, NoRoomError):
            advice = "the coordinator ejects the rank for a while; check what else uses its device"
            log.warning("step_without_room", group=group.name, reason=str(error), advice=advice)
            self._no_room = binding.formation
        elif binding.formation != error.formation:
            raise error
        else:
            log.warning("step_aborted", group=group.name, reason=str(error))
        # The mark is for all members: they may not know of the loss.
        self._communicators.abort(group.ranks, binding.formation)
        yield ForgetSteps(binding)
        self._return_tasks(binding)

    def _return_tasks(self, binding: Binding) -> None:
        if self.participant.is_leader:
            scheduler = self.runtime.mode_of(binding.group).scheduler
            assert scheduler is not None
            tasks = list(scheduler.requests)
            self.runtime.give_up(binding.group, tasks, ReturnCause.RECOMPUTE)

    # ------------------------------------------------------------------ reports

    @property
    def _is_report_due(self) -> bool:
        return self._reports.is_due(self._now_ns) or self.oom_formation != self._reported_no_room

    def _take_report(self) -> Report:
        self._reported_no_room = self.oom_formation
        times, probed = self._clock.take(), self.probing.results
        return self._reports.take(self._now_ns, times, probed, self._reported_no_room)

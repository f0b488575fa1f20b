"""The main loop of a rank: read the inbox, carry out the participant's actions, run a step, report.

One thread owns the participant, the runtime, the page accounting and the sockets to gateways; the
session's thread only exchanges messages with it. Safe points lie between two passes.
"""

import queue
import time
from collections.abc import Callable
from typing import assert_never

import structlog

from comm_pool.formations import PeerLostError
from comm_pool.layout import Rank
from coordinator.protocol.config import Config
from coordinator.protocol.messages.rank import (
    Directive,
    Drop,
    GiveBack,
    Place,
    RankDown,
    Report,
    Stop,
)
from coordinator.protocol.messages.tasks import TaskProgress
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
from coordinator.protocol.terms import Binding, Carry
from worker.io.session import HelloWanted, Inbox, RankSession, now_ms
from worker.io.step_queue import FOLLOWER_POLL_S, LEADER_SEND_LIMIT_S, Begin, LeaveGroup
from worker.rank.departure import Departure
from worker.rank.engine import Engine
from worker.rank.formation_abort import FormationAbort
from worker.rank.hello import hello_of, is_paused
from worker.rank.lease_members import LeaseUpdates
from worker.rank.migration.copy_rounds import OvertakenError
from worker.rank.quarantine_probe import QuarantineProbe
from worker.rank.runtime import GroupRuntime
from worker.rank.switch_clock import SwitchClock

log = structlog.get_logger()

GAUGES_S = 0.5
"""Interval between readings of the leak gauges: a reading costs a step one millisecond."""

IDLE_WAIT_S = 0.05
"""Maximum wait for the inbox when there is no step to run."""

DETACHED_POLL_S = 0.0003
"""The same while a detached step is in flight or peers' mailboxes are awaited."""


class RankLoop:
    """Runs one incarnation of one rank until it is stopped."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        runtime: GroupRuntime,
        session: RankSession,
        inbox: Inbox,
        participant: SwitchParticipant,
        watch_links: Callable[[], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._runtime = runtime
        self._steps = runtime.steps
        self._session = session
        self._inbox = inbox
        self._rank: Rank = engine.spec.rank
        self._incarnation = participant.incarnation
        self._participant = participant
        self._lost = FormationAbort(participant, runtime)
        self._leaving = Departure(runtime, engine.spec.rank)
        self._watch_links = watch_links
        self._heartbeat_s = config.coordinator.heartbeat_ms / 1e3
        self._clock = SwitchClock()
        self._probing = QuarantineProbe(engine, after_switch=config.cell.probe_after_switch)
        self._pending_commands: list[Drop | GiveBack] = []
        """Task commands received during a migration."""
        self._leases = LeaseUpdates(runtime, participant)
        self._moved_with: Directive | None = None
        """The directive of the last migration; it names the processes that took part."""
        self.passes = 0  # Grows while the loop makes progress; the watchdog reads it.
        self._reported_at_s = 0.0
        self._gauges: tuple[tuple[str, int], ...] = ()
        self._gauges_due_s = 0.0
        self._changed = True
        self.stop_reason: str | None = None

    def run(self) -> None:
        """Loop until `Stop` arrives or `stop_reason` is set."""
        self._session.start()
        while self.stop_reason is None:
            # A loop in an aborted formation makes no progress.
            self.passes += not self._lost.is_joined
            worked = self._pass()
            self._watch_links()
            self._report_if_due()
            if not worked and self.stop_reason is None:
                self._wait()
        self._steps.run_deferred()  # The other members wait in it.

    def _pass(self) -> bool:
        self._collect_finished()
        self._take_inbox()
        moved = self._make_moves()
        is_lost = self._lost.is_noticed()
        if not is_lost and self._participant.may_step(now_ms()) and self._runtime.has_work:
            self._lead_step()
            self._runtime.tidy()
            return True
        if moved and not isinstance(moved[-1], Serve):
            # All ranks wait for this report, and a follower may next block on its leader.
            self._report_if_due()
        if self._participant.is_follower and not self._participant.has_leave and not is_lost:
            self._follow()
            return True
        if self._participant.may_drain:
            for formation in self._runtime.drain_queues():
                self._participant.on_leave(formation)
        return bool(moved)

    # ------------------------------------------------------------------ inbox

    def _wait(self) -> None:
        participant = self._participant
        if participant.serving or (participant.binding is None and not participant.is_moving):
            # While a rank is migrating or joined to a group, others wait for it.
            self._runtime.tidy()
        wanted = participant.wanted if participant.is_moving else None
        awaits_peers = self._runtime.migration.prepare(wanted)
        try:
            item = self._inbox.get(
                timeout=self._poll_s(DETACHED_POLL_S if awaits_peers else IDLE_WAIT_S)
            )
        except queue.Empty:
            return
        self._handle(item)

    def _poll_s(self, otherwise_s: float) -> float:
        is_draining = self._steps.has_detached_step or self._runtime.migration.is_quiescing
        return DETACHED_POLL_S if is_draining else otherwise_s

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, item: RankDown | HelloWanted) -> None:
        match item:
            case Directive():
                self._clock.wanted(item.stage.epoch)
                self._participant.on_directive(item)
                self._changed |= self._leases.hear(item)
            case Place():
                self._runtime.place(item, self._participant.binding)
                self._changed |= bool(self._runtime.returned or self._runtime.ended)
            case Drop() | GiveBack() if self._participant.is_moving:
                self._pending_commands.append(item)  # The published manifest must stay true.
            case Drop() | GiveBack():
                self._obey(item)
            case HelloWanted():
                self._session.hello(
                    hello_of(self._engine, self._runtime, self._participant, self._pending_commands)
                )
                self._changed = True
            case Stop(reason=reason):
                self.stop_reason = reason
            case _:
                assert_never(item)

    def _obey(self, item: Drop | GiveBack) -> None:
        if isinstance(item, Drop):
            self._lost.guarded(lambda: self._runtime.drop(item.task, item.attempt))
        else:
            self._lost.guarded(lambda: self._runtime.give_back(item.task))
        self._changed = True

    # ------------------------------------------------------------------ actions

    def _make_moves(self) -> list[Move]:
        moved: list[Move] = []
        while self.stop_reason is None:
            move = self._lost.check(self._participant.next_move(idle=not self._runtime.has_work))
            if move is None or (
                not self._steps.has_deferred_step and self._leaving.is_put_off(move)
            ):
                break
            if isinstance(move, Leave) and self._defers_last_step(move):
                continue  # The step may have shown that the group is lost.
            started = time.perf_counter_ns()
            try:
                self._carry_out(move)
            except OvertakenError:
                continue
            self._participant.made(move)
            moved.append(move)
            self._changed = True
            self._after(move)
            took_us = (time.perf_counter_ns() - started) // 1000
            ended_ns = None if self._steps.has_detached_step else self._steps.ended_ns
            self._clock.made(move, took_us, ended_ns)
        return moved

    def _defers_last_step(self, move: Leave) -> bool:
        """Plan and defer a last step before leaving, if allowed; return whether it did."""
        is_deferred = self._participant.may_step(now_ms()) and self._leaving.defers_step_for(move)
        if is_deferred:
            self._lost.guarded(lambda: self._runtime.defer_step(self._participant.stage.epoch))
        return is_deferred

    def _carry_out(self, move: Move) -> None:
        runtime = self._runtime
        match move:
            case Leave():
                self._leave(move)
            case Join(binding=binding):
                runtime.join(binding)
                self._leases.formed(binding.group.ranks, move.directive)
            case Serve(
                binding=binding, grant_pages=pages, retention=retention, directive=directive
            ):
                if binding.group.leader == self._rank:
                    indices = retention.indices if retention is not None else ()
                    self._lost.guarded(lambda: runtime.serve(binding, indices, pages))
                    if self._lost.is_joined:
                        return
                    self._clock.begun(is_busy=runtime.has_tasks)
                    self._clock.leads(directive.stage.epoch)
                    self._lost.guarded(lambda: self._probing.formed(runtime, binding, directive))
            case Reshard(directive=directive):
                runtime.migration.move(directive, lambda: self._is_overtaken(directive))
            case Resolve():
                if move.is_committed and self._moved_with is not None:
                    self._share(self._moved_with)
                runtime.migration.resolve(move)
            case Park() | Ack():
                pass
            case _:
                assert_never(move)

    def _leave(self, move: Leave) -> None:
        runtime, binding = self._runtime, move.binding
        if move.is_leader:
            # Tasks that keep their KV are parked in their state after the in-flight step.
            if move.group_lost or move.carry not in KEEPING:
                self._lost.guarded(self._steps.finish_inflight)
        else:
            while self._follow(wait_s=0.0):
                pass  # A live leader may be waiting in a step that it has sent.
        self._steps.on_leave(self._participant.joined)
        runtime.unbind()
        if move.is_leader:
            runtime.park(binding.group, move.carry, group_lost=move.group_lost)
            self._send_leave(binding, move.carry, move.group_lost)
        if move.carry is Carry.RESHARD and not move.group_lost:
            runtime.migration.on_leave(binding)

    def _share(self, directive: Directive) -> None:
        if (binding := directive.target.binding_of(self._rank)) is not None:
            self._leases.formed(binding.group.ranks, directive)

    def _is_overtaken(self, directive: Directive) -> bool:
        self._take_inbox()
        wanted = self._participant.wanted
        overtaken = wanted is not None and wanted.stage.epoch > directive.stage.epoch
        return overtaken or self.stop_reason is not None

    def _after(self, move: Move) -> None:
        self._leases.made(move)
        match move:
            case Leave(directive=directive) if self._participant.is_moving:
                # While the report travels, peers read here what they plan the migration from.
                self._runtime.migration.publish(directive.stage.epoch)
            case Reshard(directive=directive):
                self._moved_with = directive
                self._collect_finished()
            case Resolve():
                commands, self._pending_commands = self._pending_commands, []
                for item in commands:
                    self._obey(item)
            case _:
                pass

    def _send_leave(self, binding: Binding, carry: Carry, lost: bool) -> None:
        group = binding.group
        wait_s = 0.0 if lost else LEADER_SEND_LIMIT_S
        retention = self._runtime.retentions.get(group.ranks)
        has_withdrawn = lost or carry is not Carry.RESHARD
        indices = retention.indices if has_withdrawn and retention is not None else None
        try:
            self._runtime.tell(group, LeaveGroup(binding.formation, indices), wait_s=wait_s)
        except (TimeoutError, PeerLostError):
            log.warning(
                "leave_not_sent",
                group=group.name,
                reason="its followers do not read their step queue",
            )
        if indices is not None:
            # The followers do the same: the next grant counts the pages that each member has free
            # after it left.
            self._runtime.keep_only(group.ranks, indices)

    # ------------------------------------------------------------------ steps

    def _lead_step(self) -> None:
        steps, count = self._steps, self._steps.count
        took_us = self._lost.guarded(lambda: self._runtime.lead_step(self._participant.stage.epoch))
        self._collect_finished()
        if took_us is not None and steps.count > count:
            self._changed |= self._clock.stepped(steps.started_ns, took_us)
        self._changed |= took_us is None or bool(self._runtime.ended)

    def _collect_finished(self) -> None:
        """Collect results of a detached step and of finished copies, as soon as they are there."""
        self._runtime.look()
        if (copied := self._runtime.migration.take_copied()) is not None:
            self._clock.copied(*copied)
            self._changed = True
        ended_ns = self._steps.take_detached_end_ns()
        if ended_ns is not None:
            self._clock.quiesced(ended_ns)
            self._changed = True

    def _follow(self, *, wait_s: float | None = None) -> bool:
        wait_s = self._poll_s(FOLLOWER_POLL_S) if wait_s is None else wait_s
        binding, steps = self._participant.binding, self._steps.count
        assert binding is not None
        message = self._lost.guarded(lambda: self._runtime.follow(binding, wait_s=wait_s))
        if isinstance(message, LeaveGroup):
            self._participant.on_leave(message.formation, for_move=message.lease_indices is None)
        if isinstance(message, Begin):
            self._clock.begun(is_busy=message.is_busy)
        if message is not None and self._steps.count > steps:
            self._runtime.tidy()
            self._collect_finished()
            self._changed |= self._clock.stepped(self._steps.started_ns, None)
        return message is not None

    # ------------------------------------------------------------------ reports

    def _report_if_due(self) -> None:
        due = time.monotonic() - self._reported_at_s >= self._heartbeat_s
        if not (due or self._changed or self._lost.has_news):
            return
        self._session.publish(self._report(with_progress=due))
        if due:
            self._reported_at_s = time.monotonic()
        self._changed = False

    def _report(self, *, with_progress: bool) -> Report:
        runtime, participant = self._runtime, self._participant
        scheduler = None
        if participant.is_leader and participant.serving and participant.binding is not None:
            scheduler = runtime.mode_of(participant.binding.group).scheduler
        running, waiting = scheduler.get_request_counts() if scheduler is not None else (0, 0)
        ended, runtime.ended = runtime.ended, []
        returned, runtime.returned = runtime.returned, []
        cached, runtime.migration.cached = runtime.migration.cached, ()
        moved, heard_in_epoch = participant.known_migration
        if with_progress and time.monotonic() >= self._gauges_due_s:
            self._gauges_due_s = time.monotonic() + GAUGES_S
            steps = ("steps", self._steps.count), ("steps_sp", self._steps.sp_count)
            self._gauges = (*self._engine.gauges(), *steps)
        return Report(
            rank=self._rank,
            incarnation=self._incarnation,
            sent_at_ms=now_ms(),
            stage=participant.stage,
            binding=participant.binding,
            target=participant.target,
            pages=runtime.page_report(),
            running=running,
            waiting=waiting,
            paused=len(runtime.book) - running - waiting,
            blocks_free=scheduler.blocks_free if scheduler is not None else 0,
            blocks_total=scheduler.blocks_total if scheduler is not None else 0,
            retentions=tuple(runtime.retentions.values()),
            ended=tuple(ended),
            returned=tuple(returned),
            progress=self._progress() if with_progress else (),
            times=self._clock.take(),
            gauges=self._gauges,
            adopted=runtime.migration.adopted if participant.is_moving else (),
            cached=cached,
            has_failed=runtime.migration.has_failed,
            moved=moved,
            heard_in_epoch=heard_in_epoch,
            served=self._steps.log.take() if with_progress else (),
            probed=self._probing.results,
            closed=self._engine.communicators.closed,
            free_pages_after_commit=runtime.migration.free_pages_after_commit,
            oom_formation=self._lost.tell(),
        )

    def _progress(self) -> tuple[TaskProgress, ...]:
        runtime, participant = self._runtime, self._participant
        return tuple(
            TaskProgress(led.header.task, led.emitted, is_paused(led, runtime, participant))
            for led in runtime.book
        )

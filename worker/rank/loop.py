"""The main loop of a rank: read the inbox, make the seat's moves, run a step, report.

One thread owns the seat, the member, the page accounting and the sockets to gateways; the session's
thread only exchanges messages with it. Safe points are between two passes of this loop.
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
from worker.engine.rank_engine import RankEngine
from worker.io.session import HelloWanted, Inbox, RankSession, now_ms
from worker.io.step_queue import FOLLOWER_POLL_S, LEADER_SEND_LIMIT_S, Begin, LeaveGroup
from worker.rank.departure import Departure
from worker.rank.formation_abort import FormationAbort
from worker.rank.hello import hello_of, is_paused
from worker.rank.lease_members import LeaseUpdates
from worker.rank.migration.copy_rounds import OvertakenError
from worker.rank.quarantine_probe import QuarantineProbe
from worker.rank.runtime import GroupRuntime
from worker.rank.switch_clock import SwitchClock

log = structlog.get_logger()

GAUGES_S = 0.5
"""How often what leaks would show in is read: it costs a step a millisecond."""

IDLE_WAIT_S = 0.05
"""Longest wait for the inbox when there is no step to run."""

TRAIL_POLL_S = 0.0003
"""The same while clients wait for a last step of a group that was left, or for what ranks tell."""


class RankLoop:
    """Runs one incarnation of one rank until it is told to stop."""

    def __init__(
        self,
        config: Config,
        engine: RankEngine,
        member: GroupRuntime,
        session: RankSession,
        inbox: Inbox,
        seat: SwitchParticipant,
        watch_links: Callable[[], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._member = member
        self._stepping = member.stepping
        self._session = session
        self._inbox = inbox
        self._rank: Rank = engine.spec.rank
        self._incarnation = seat.incarnation
        self._seat = seat
        self._lost = FormationAbort(seat, member)
        self._leaving = Departure(member, engine.spec.rank)
        self._watch_links = watch_links
        self._heartbeat_s = config.coordinator.heartbeat_ms / 1e3
        self._clock = SwitchClock()
        self._probing = QuarantineProbe(engine, after_switch=config.cell.probe_after_switch)
        self._deferred: list[Drop | GiveBack] = []
        """Task commands that came during a move."""
        self._leases = LeaseUpdates(member, seat)
        self._moved_with: Directive | None = None
        """Which processes took part in the last move."""
        self.passes = 0  # Grows while the loop goes on, for a watchdog to see.
        self._reported_at_s = 0.0
        self._gauges: tuple[tuple[str, int], ...] = ()
        self._gauges_due_s = 0.0
        self._changed = True
        self.stop_reason: str | None = None

    def run(self) -> None:
        """Loop until `Stop` arrives or `stop_reason` is set."""
        self._session.start()
        while self.stop_reason is None:
            self.passes += not self._lost.is_joined  # A rank that cannot leave it is stuck, too.
            worked = self._pass()
            self._watch_links()
            self._report_if_due()
            if not worked and self.stop_reason is None:
                self._wait()
        self._stepping.catch_up()  # The others wait in it.

    def _pass(self) -> bool:
        self._look_behind()
        self._take_inbox()
        moved = self._make_moves()
        is_lost = self._lost.is_noticed()
        if not is_lost and self._seat.may_step(now_ms()) and self._member.has_work:
            self._lead_step()
            self._member.tidy()
            return True
        if moved and not isinstance(moved[-1], Serve):
            self._report_if_due()  # All wait for it; a follower may wait for its leader next.
        if self._seat.is_follower and not self._seat.is_left and not is_lost:
            self._follow()
            return True
        if self._seat.may_drain:
            for born in self._member.drain_queues():
                self._seat.on_leave(born)
        return bool(moved)

    # ------------------------------------------------------------------ inbox

    def _wait(self) -> None:
        seat = self._seat
        if seat.serving or (seat.binding is None and not seat.is_moving):
            # A rank that moves or has joined a group is waited for.
            self._member.tidy()
        wanted = seat.wanted if seat.is_moving else None
        looks_out = self._member.moving.prepare(wanted)
        try:
            item = self._inbox.get(timeout=self._poll_s(TRAIL_POLL_S if looks_out else IDLE_WAIT_S))
        except queue.Empty:
            return
        self._handle(item)

    def _poll_s(self, otherwise_s: float) -> float:
        behind = self._stepping.trails or self._member.moving.is_settling
        return TRAIL_POLL_S if behind else otherwise_s

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, item: RankDown | HelloWanted) -> None:
        match item:
            case Directive():
                self._clock.wanted(item.stage.epoch)
                self._seat.on_directive(item)
                self._changed |= self._leases.hear(item)
            case Place():
                self._member.place(item, self._seat.binding)
                self._changed |= bool(self._member.returned or self._member.ended)
            case Drop() | GiveBack() if self._seat.is_moving:
                self._deferred.append(item)  # What is told of a move must stay true until its end.
            case Drop() | GiveBack():
                self._obey(item)
            case HelloWanted():
                told = self._engine, self._member, self._seat, self._deferred
                self._session.hello(hello_of(*told))
                self._changed = True
            case Stop(reason=reason):
                self.stop_reason = reason
            case _:
                assert_never(item)

    def _obey(self, item: Drop | GiveBack) -> None:
        if isinstance(item, Drop):
            self._lost.guarded(lambda: self._member.drop(item.task, item.attempt))
        else:
            self._lost.guarded(lambda: self._member.give_back(item.task))
        self._changed = True

    # ------------------------------------------------------------------ moves

    def _make_moves(self) -> list[Move]:
        moved: list[Move] = []
        while self.stop_reason is None:
            move = self._lost.judged(self._seat.next_move(idle=not self._member.has_work))
            if move is None or (not self._stepping.is_held and self._leaving.is_put_off(move)):
                break
            if isinstance(move, Leave) and self._holds_a_step(move):
                continue  # It may turn out that the group is lost.
            started = time.perf_counter_ns()
            try:
                self._carry_out(move)
            except OvertakenError:
                continue
            self._seat.made(move)
            moved.append(move)
            self._changed = True
            self._after(move)
            took_us = (time.perf_counter_ns() - started) // 1000
            ended_ns = None if self._stepping.trails else self._stepping.ended_ns
            self._clock.made(move, took_us, ended_ns)
        return moved

    def _holds_a_step(self, move: Leave) -> bool:
        """Plan a last step before leaving where that may be; returns whether it was."""
        is_held = self._seat.may_step(now_ms()) and self._leaving.is_held_for(move)
        if is_held:
            self._lost.guarded(lambda: self._member.hold_step(self._seat.stage.epoch))
        return is_held

    def _carry_out(self, move: Move) -> None:
        member = self._member
        match move:
            case Leave():
                self._leave(move)
            case Join(binding=binding):
                member.join(binding)
                self._leases.formed(binding.group.ranks, move.directive)
            case Serve(binding=binding, grant_pages=pages, kept=kept, directive=directive):
                if binding.group.leader == self._rank:
                    indices = kept.indices if kept is not None else ()
                    self._lost.guarded(lambda: member.serve(binding, indices, pages))
                    if self._lost.is_joined:
                        return
                    self._clock.begun(is_busy=member.has_tasks)
                    self._clock.leads(directive.stage.epoch)
                    self._lost.guarded(lambda: self._probing.formed(member, binding, directive))
            case Reshard(directive=directive):
                member.moving.move(directive, lambda: self._is_overtaken(directive))
            case Resolve():
                if move.is_committed and self._moved_with is not None:
                    self._share(self._moved_with)
                member.moving.resolve(move)
            case Park() | Ack():
                pass
            case _:
                assert_never(move)

    def _leave(self, move: Leave) -> None:
        member, binding = self._member, move.binding
        if move.is_leader:
            # Tasks that keep their KV are parked as they will be behind the step under way.
            if move.group_lost or move.carry not in KEEPING:
                self._lost.guarded(self._stepping.settle)
        else:
            while self._follow(wait_s=0.0):
                pass  # A leader that is alive may wait in a step that it has sent.
        self._stepping.left(self._seat.joined)
        member.unbind()
        if move.is_leader:
            member.park(binding.group, move.carry, group_lost=move.group_lost)
            self._send_leave(binding, move.carry, move.group_lost)
        if move.carry is Carry.RESHARD and not move.group_lost:
            member.moving.left(binding)

    def _share(self, directive: Directive) -> None:
        if (binding := directive.target.binding_of(self._rank)) is not None:
            self._leases.formed(binding.group.ranks, directive)

    def _is_overtaken(self, directive: Directive) -> bool:
        self._take_inbox()
        wanted = self._seat.wanted
        overtaken = wanted is not None and wanted.stage.epoch > directive.stage.epoch
        return overtaken or self.stop_reason is not None

    def _after(self, move: Move) -> None:
        self._leases.made(move)
        match move:
            case Leave(directive=directive) if self._seat.is_moving:
                # While the report travels, peers find here what they plan the move from.
                self._member.moving.tell(directive.stage.epoch)
            case Reshard(directive=directive):
                self._moved_with = directive
                self._look_behind()
            case Resolve():
                deferred, self._deferred = self._deferred, []
                for item in deferred:
                    self._obey(item)
            case _:
                pass

    def _send_leave(self, binding: Binding, carry: Carry, lost: bool) -> None:
        group = binding.group
        wait_s = 0.0 if lost else LEADER_SEND_LIMIT_S
        told = self._member.kept.get(group.ranks)
        has_withdrawn = lost or carry is not Carry.RESHARD
        kept = told.indices if has_withdrawn and told is not None else None
        try:
            self._member.tell(group, LeaveGroup(binding.born, kept), wait_s=wait_s)
        except (TimeoutError, PeerLostError):
            log.warning("leave_not_sent", group=group.name, reason="its followers do not read")
        if kept is not None:
            # As they do: the next grant counts what every member has free when it has left.
            self._member.keep_only(group.ranks, kept)

    # ------------------------------------------------------------------ steps

    def _lead_step(self) -> None:
        stepping, steps = self._stepping, self._stepping.count
        took_us = self._lost.guarded(lambda: self._member.lead_step(self._seat.stage.epoch))
        self._look_behind()
        if took_us is not None and stepping.count > steps:
            self._changed |= self._clock.stepped(stepping.started_ns, took_us)
        self._changed |= took_us is None or bool(self._member.ended)

    def _look_behind(self) -> None:
        """Take what the last step of a group that was left has brought, as soon as it is there."""
        self._member.look()
        if (copied := self._member.moving.take_copied()) is not None:
            self._clock.copied(*copied)
            self._changed = True
        ended_ns = self._stepping.take_left_end()
        if ended_ns is not None:
            self._clock.left(ended_ns)
            self._changed = True

    def _follow(self, *, wait_s: float | None = None) -> bool:
        wait_s = self._poll_s(FOLLOWER_POLL_S) if wait_s is None else wait_s
        binding, steps = self._seat.binding, self._stepping.count
        assert binding is not None
        message = self._lost.guarded(lambda: self._member.follow(binding, wait_s=wait_s))
        if isinstance(message, LeaveGroup):
            self._seat.on_leave(message.born, for_move=message.kept is None)
        if isinstance(message, Begin):
            self._clock.begun(is_busy=message.is_busy)
        if message is not None and self._stepping.count > steps:
            self._member.tidy()
            self._look_behind()
            self._changed |= self._clock.stepped(self._stepping.started_ns, None)
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
        member, seat = self._member, self._seat
        scheduler = None
        if seat.is_leader and seat.serving and seat.binding is not None:
            scheduler = member.mode_of(seat.binding.group).scheduler
        running, waiting = scheduler.get_request_counts() if scheduler is not None else (0, 0)
        ended, member.ended = member.ended, []
        returned, member.returned = member.returned, []
        cached, member.moving.cached = member.moving.cached, ()
        moved, told_in = seat.told
        if with_progress and time.monotonic() >= self._gauges_due_s:
            self._gauges_due_s = time.monotonic() + GAUGES_S
            steps = ("steps", self._stepping.count), ("steps_sp", self._stepping.sp_count)
            self._gauges = (*self._engine.gauges(), *steps)
        return Report(
            rank=self._rank,
            incarnation=self._incarnation,
            sent_at_ms=now_ms(),
            stage=seat.stage,
            binding=seat.binding,
            target=seat.target,
            pages=member.page_report(),
            running=running,
            waiting=waiting,
            paused=len(member.book) - running - waiting,
            blocks_free=scheduler.grants.free if scheduler is not None else 0,
            blocks_total=scheduler.grants.total if scheduler is not None else 0,
            kept=tuple(member.kept.values()),
            ended=tuple(ended),
            returned=tuple(returned),
            progress=self._progress() if with_progress else (),
            times=self._clock.take(),
            gauges=self._gauges,
            adopted=member.moving.adopted if seat.is_moving else (),
            cached=cached,
            has_failed=member.moving.has_failed,
            moved=moved,
            told_in=told_in,
            served=self._stepping.log.take() if with_progress else (),
            probed=self._probing.results,
            closed=self._engine.communicators.closed,
            free_then=member.moving.free_then,
            no_room=self._lost.tell(),
        )

    def _progress(self) -> tuple[TaskProgress, ...]:
        member, seat = self._member, self._seat
        return tuple(
            TaskProgress(led.header.task, led.emitted, is_paused(led, member, seat))
            for led in member.book
        )

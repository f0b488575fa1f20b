"""The main loop of a rank: read the inbox, make the seat's moves, run a step, report.

One thread owns the seat, the member and the page accounting; the session and outlet threads only
exchange messages with it. Safe points are between two passes of this loop.
"""

import os
import queue
import time
from typing import assert_never

import structlog

from comm_pool.layout import Group, Rank
from coordinator.protocol.config import Config
from coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Directive,
    Drop,
    GiveBack,
    HeldTask,
    LeaseKept,
    Place,
    RankDown,
    RankHello,
    Report,
    Stop,
    SwitchTimes,
    TaskProgress,
)
from coordinator.protocol.seat import Ack, Join, Leave, Move, OweLeave, Park, Seat, Serve
from worker.member import Member
from worker.session import HelloWanted, Inbox, RankSession, now_ms
from worker.step_queue import LEADER_SEND_LIMIT_S, Begin, LeaveGroup
from worker.vllm_rank import RankEngine

log = structlog.get_logger()

IDLE_WAIT_S = 0.05
"""Longest wait for the inbox when there is no step to run."""


class RankLoop:
    """Runs one incarnation of one rank until it is told to stop."""

    def __init__(
        self,
        config: Config,
        engine: RankEngine,
        member: Member,
        session: RankSession,
        inbox: Inbox,
        incarnation: int,
    ) -> None:
        self._config = config
        self._engine = engine
        self._member = member
        self._session = session
        self._inbox = inbox
        self._rank: Rank = engine.spec.rank
        self._incarnation = incarnation
        self._seat = Seat(self._rank, incarnation)
        self._heartbeat_s = config.coordinator.heartbeat_ms / 1e3
        self._wanted_since_ns: dict[int, int] = {}
        self._times: dict[int, SwitchTimes] = {}
        self._unsent_times: list[SwitchTimes] = []
        self._first_step_of: int | None = None
        self._reported_at_s = 0.0
        self._gauges: tuple[tuple[str, int], ...] = ()
        self._changed = True
        self.stop_reason: str | None = None

    def run(self) -> None:
        """Loop until `Stop` arrives or `stop_reason` is set."""
        self._session.start()
        while self.stop_reason is None:
            worked = self._pass()
            self._report_if_due()
            if not worked and self.stop_reason is None:
                self._wait()

    def _pass(self) -> bool:
        self._take_inbox()
        moved = self._make_moves()
        if self._seat.may_step(now_ms()) and self._member.has_work:
            self._lead_step()
            return True
        if self._seat.is_follower:
            self._follow()
            return True
        if self._seat.binding is None:
            for born in self._member.drain_queues():
                self._seat.on_leave(born)
        return moved

    # ------------------------------------------------------------------ inbox

    def _wait(self) -> None:
        try:
            item = self._inbox.get(timeout=IDLE_WAIT_S)
        except queue.Empty:
            return
        self._handle(item)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, item: RankDown | HelloWanted) -> None:
        match item:
            case Directive():
                self._wanted_since_ns.setdefault(item.stage.epoch, time.monotonic_ns())
                self._seat.on_directive(item)
                self._changed |= self._member.apply_kept(self._appliable(item.kept))
            case Place():
                self._member.place(item, self._seat.binding)
                self._changed |= bool(self._member.returned or self._member.ended)
            case Drop(task=task):
                self._member.drop(task)
                self._changed = True
            case GiveBack(task=task):
                self._member.give_back(task)
                self._changed = True
            case HelloWanted():
                self._session.hello(self._hello())
                self._changed = True
            case Stop(reason=reason):
                self.stop_reason = reason
            case _:
                assert_never(item)

    def _appliable(self, kept: tuple[LeaseKept, ...]) -> list[LeaseKept]:
        """Kept leases of groups that this rank is in; others have none here."""
        return [lease for lease in kept if self._rank in lease.ranks]

    # ------------------------------------------------------------------ moves

    def _make_moves(self) -> bool:
        moved = False
        while (move := self._seat.next_move(idle=not self._member.has_work)) is not None:
            started = time.perf_counter_ns()
            self._carry_out(move)
            self._seat.made(move)
            self._note_times(move, (time.perf_counter_ns() - started) // 1000)
            moved = self._changed = True
        return moved

    def _carry_out(self, move: Move) -> None:
        member = self._member
        match move:
            case Leave(binding=binding, carry=carry, is_leader=is_leader, group_lost=lost):
                if is_leader:
                    member.settle()
                    self._send_leave(binding.group, binding.born, lost)
                    member.unbind()
                    member.park(binding.group, carry, group_lost=lost)
                else:
                    while self._follow():
                        pass  # A leader that is alive may wait in a step that it has sent.
                    member.unbind()
            case OweLeave(binding=binding):
                self._send_leave(binding.group, binding.born, False)
            case Join(binding=binding):
                member.join(binding)
            case Serve(binding=binding, grant_pages=pages, kept=kept):
                if binding.group.leader == self._rank:
                    indices = kept.indices if kept is not None else ()
                    member.lead(Begin(binding.born, indices, pages))
                    member.begin(pages, indices)
                    self._first_step_of = move.directive.stage.epoch
            case Park() | Ack():
                pass
            case _:
                assert_never(move)

    def _send_leave(self, group: Group, born: int, lost: bool) -> None:
        wait_s = 0.0 if lost else LEADER_SEND_LIMIT_S
        try:
            self._member.tell(group, LeaveGroup(born), wait_s=wait_s)
        except TimeoutError:
            log.warning("leave_not_sent", group=group.name, reason="its followers do not read")

    def _note_times(self, move: Move, took_us: int) -> None:
        match move:
            case Leave(directive=directive):
                epoch = directive.stage.epoch
                since = self._wanted_since_ns.get(epoch, time.monotonic_ns())
                self._add_times(epoch, park_us=(time.monotonic_ns() - since) // 1000)
            case Join(directive=directive):
                self._add_times(directive.stage.epoch, swap_us=took_us)
            case _:
                pass

    def _add_times(
        self, epoch: int, *, park_us: int = 0, swap_us: int = 0, first_step_us: int = 0
    ) -> None:
        old = self._times.get(epoch, SwitchTimes(epoch))
        new = SwitchTimes(
            epoch,
            old.park_us or park_us,
            old.swap_us or swap_us,
            old.first_step_us or first_step_us,
        )
        self._times = {epoch: new}
        self._unsent_times.append(new)
        for past in [e for e in self._wanted_since_ns if e < epoch]:
            del self._wanted_since_ns[past]

    # ------------------------------------------------------------------ steps

    def _lead_step(self) -> None:
        took_us = self._member.lead_step(self._seat.stage.epoch)
        if self._first_step_of is not None:
            self._add_times(self._first_step_of, first_step_us=took_us)
            self._first_step_of = None
            self._changed = True
        self._changed |= bool(self._member.ended)

    def _follow(self) -> bool:
        assert self._seat.binding is not None
        message = self._member.follow(self._seat.binding)
        if isinstance(message, LeaveGroup):
            self._seat.on_leave(message.born)
        return message is not None

    # ------------------------------------------------------------------ reports

    def _report_if_due(self) -> None:
        due = time.monotonic() - self._reported_at_s >= self._heartbeat_s
        if not (due or self._changed):
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
        times, self._unsent_times = self._unsent_times, []
        if with_progress:
            self._gauges = (*self._engine.gauges(), ("steps", member.steps))
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
            times=tuple(times),
            gauges=self._gauges,
        )

    def _progress(self) -> tuple[TaskProgress, ...]:
        group = self._seat.binding.group if self._seat.binding is not None else None
        return tuple(
            TaskProgress(led.header.task, led.emitted, led.group != group)
            for led in self._member.book
        )

    def _hello(self) -> RankHello:
        engine = self._engine
        group = self._seat.binding.group if self._seat.binding is not None else None
        return RankHello(
            version=PROTOCOL_VERSION,
            rank=self._rank,
            incarnation=self._incarnation,
            pid=os.getpid(),
            device=str(engine.device),
            widths=engine.spec.widths,
            max_tasks=engine.base.scheduler_config.max_num_seqs,
            max_model_len_tokens=engine.base.model_config.max_model_len,
            tokens_per_slot=engine.kv.geometry.tokens_per_slot,
            kv_heads=engine.kv.geometry.num_kv_heads,
            pages_total=engine.kv.num_pages,
            held=tuple(
                HeldTask(led.header, led.attempt, led.group, led.emitted, led.group != group)
                for led in self._member.book
            ),
            memory=engine.memory(),
        )

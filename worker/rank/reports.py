"""What a rank tells its coordinator: a hello when a session begins, then reports.

A report is due on news, and with every heartbeat.
"""

import os
from collections.abc import Sequence

from comm_pool.layout import Rank
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import (
    Drop,
    GiveBack,
    Probed,
    RankHello,
    Report,
    SwitchTimes,
)
from coordinator.protocol.messages.tasks import HeldTask, TaskProgress
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import TaskId, Tier
from worker.rank.engine import Engine, EngineFacts, EngineScheduler
from worker.rank.led_tasks import LedTask
from worker.rank.runtime import GroupRuntime
from worker.spec import modes_widths, part_of

GAUGES_NS = 500_000_000
"""Interval between readings of the leak gauges: a reading costs a step one millisecond."""


class Reports:
    """Builds the reports of a rank; events of its runtime appear in one report each."""

    def __init__(
        self,
        engine: Engine,
        runtime: GroupRuntime,
        participant: SwitchParticipant,
        heartbeat_s: float,
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._participant = participant
        self._heartbeat_ns = int(heartbeat_s * 1e9)
        self._heartbeat_due_ns = 0
        self._gauges: tuple[tuple[str, int], ...] = ()
        self._gauges_due_ns: int | None = None
        self.has_news = True
        """Whether a report is due before the next heartbeat."""

    def is_due(self, now_ns: int) -> bool:
        """Return whether to send a report."""
        return self.has_news or now_ns >= self._heartbeat_due_ns

    def take(
        self,
        now_ns: int,
        times: tuple[SwitchTimes, ...],
        probed: tuple[Probed, ...],
        oom_formation: int,
    ) -> Report:
        """Return a report to send now; it has the rank's newest events, which are then old."""
        is_heartbeat, runtime = now_ns >= self._heartbeat_due_ns, self._runtime
        if is_heartbeat:
            self._heartbeat_due_ns = now_ns + self._heartbeat_ns
            self._read_gauges(now_ns)
        self.has_news = False
        participant, migration, steps = self._participant, runtime.migration, runtime.steps
        scheduler = None
        if participant.is_leader and participant.serving and participant.binding is not None:
            scheduler = runtime.mode_of(participant.binding.group).scheduler
        running, waiting = scheduler.get_request_counts() if scheduler is not None else (0, 0)
        ended, runtime.ended = runtime.ended, []
        returned, runtime.returned = runtime.returned, []
        cached, migration.cached = migration.cached, ()
        moved, heard_in_epoch = participant.known_migration
        return Report(
            rank=self._engine.spec.rank,
            incarnation=participant.incarnation,
            sent_at_ms=now_ns // 1_000_000,
            stage=participant.stage,
            binding=participant.binding,
            target=participant.target,
            pages=runtime.page_report(),
            running=running,
            waiting=waiting,
            paused=len(runtime.book) - running - waiting,
            blocks_free=scheduler.blocks_free if scheduler is not None else 0,
            blocks_total=scheduler.blocks_total if scheduler is not None else 0,
            retentions=tuple(runtime.leases.retentions.values()),
            ended=tuple(ended),
            returned=tuple(returned),
            progress=self._progress() if is_heartbeat else (),
            times=times,
            gauges=self._gauges,
            adopted=migration.adopted if participant.is_moving else (),
            cached=cached,
            has_failed=migration.has_failed,
            moved=moved,
            heard_in_epoch=heard_in_epoch,
            served=steps.log.take() if is_heartbeat else (),
            probed=probed,
            closed=self._engine.communicators.closed,
            free_pages_after_commit=migration.free_pages_after_commit,
            oom_formation=oom_formation,
            precopy=migration.precopy.progress,
            urgent_waiting=self._urgent_in(scheduler) if waiting else 0,
        )

    def _urgent_in(self, scheduler: EngineScheduler | None) -> int:
        names = scheduler.not_holding() if scheduler is not None else ()
        held = [self._runtime.book.get(TaskId(name)) for name in names]
        return sum(led is not None and led.header.tier is not Tier.BATCH for led in held)

    def _read_gauges(self, now_ns: int) -> None:
        if self._gauges_due_ns is None or now_ns >= self._gauges_due_ns:
            self._gauges_due_ns = now_ns + GAUGES_NS
            steps = self._runtime.steps
            counts = ("steps", steps.count), ("steps_sp", steps.sp_count)
            self._gauges = (*self._engine.gauges(), *counts)

    def _progress(self) -> tuple[TaskProgress, ...]:
        runtime, participant = self._runtime, self._participant
        return tuple(
            TaskProgress(led.header.task, led.emitted, is_paused(led, runtime, participant))
            for led in runtime.book
        )


def hello_of(
    engine: Engine,
    runtime: GroupRuntime,
    participant: SwitchParticipant,
    pending_commands: Sequence[Drop | GiveBack] = (),
) -> RankHello:
    """Describe the rank's current state; tasks with a pending `Drop` are omitted."""
    facts = engine.facts()
    drops = {each.task: each.attempt for each in pending_commands if isinstance(each, Drop)}
    return RankHello(
        version=PROTOCOL_VERSION,
        rank=engine.spec.rank,
        incarnation=participant.incarnation,
        pid=os.getpid(),
        device=facts.device,
        widths=tuple(sorted({1, *modes_widths(engine.spec)})),
        max_tasks=facts.max_tasks,
        max_model_len_tokens=facts.max_model_len_tokens,
        tokens_per_slot=engine.kv.geometry.tokens_per_slot,
        kv_heads=engine.kv.geometry.num_kv_heads,
        pages_total=engine.kv.num_pages,
        held=tuple(
            HeldTask(
                led.header,
                led.attempt,
                led.group,
                led.emitted,
                is_paused(led, runtime, participant),
                participant.is_moving and led.group.lease_key == runtime.migration.key,
            )
            for led in runtime.book
            if led.attempt > drops.get(led.header.task, -1)
        ),
        adopted=runtime.migration.adopted if participant.is_moving else (),
        adopted_in=runtime.migration.epoch,
        memory=facts.memory,
        cohort=engine.spec.cohort,
        step_times=facts.step_times,
        inherits=facts.inherits,
        tokens_per_step_max=facts.tokens_per_step_max,
        leases=tuple(tuple(map(Rank, ranks)) for ranks in engine.pages.groups()),
        part=part_of(engine.spec),
        parts=engine.spec.parts,
        borrow=engine.spec.borrow,
        whole_layers=_whole_layers(engine, facts),
    )


def _whole_layers(engine: Engine, facts: EngineFacts) -> int:
    """Return the number of whole layers that the engine took, or that it was given."""
    if facts.whole_layers is not None:
        return facts.whole_layers
    given = engine.spec.whole_layers
    return 0 if given == "auto" else given


def is_paused(led: LedTask, runtime: GroupRuntime, participant: SwitchParticipant) -> bool:
    """Return whether a task waits for its group to form again: neither served nor migrating."""
    key = led.group.lease_key
    is_bound = participant.binding is not None and key == participant.binding.group.lease_key
    return not is_bound and key != runtime.migration.key

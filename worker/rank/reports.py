"""What a rank reports to the coordinator, and when: on news, and with every heartbeat."""

from coordinator.protocol.messages.rank import Probed, Report, SwitchTimes
from coordinator.protocol.messages.tasks import TaskProgress
from coordinator.protocol.switch_participant import SwitchParticipant
from worker.rank.engine import Engine
from worker.rank.hello import is_paused
from worker.rank.runtime import GroupRuntime

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
        self._reported_at_ns: int | None = None
        """When the last heartbeat was sent; None: none was."""
        self._gauges: tuple[tuple[str, int], ...] = ()
        self._gauges_due_ns: int | None = None
        self.has_news = True
        """Whether a report is due before the next heartbeat."""

    def is_due(self, now_ns: int) -> bool:
        """Return whether to send a report."""
        return self.has_news or self._is_heartbeat_due(now_ns)

    def _is_heartbeat_due(self, now_ns: int) -> bool:
        reported_at_ns = self._reported_at_ns
        return reported_at_ns is None or now_ns - reported_at_ns >= self._heartbeat_ns

    def take(
        self,
        now_ns: int,
        times: tuple[SwitchTimes, ...],
        probed: tuple[Probed, ...],
        oom_formation: int,
    ) -> Report:
        """Return a report to send now; it has the rank's newest events, which are then old."""
        is_heartbeat, runtime = self._is_heartbeat_due(now_ns), self._runtime
        if is_heartbeat:
            self._reported_at_ns = now_ns
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
            retentions=tuple(runtime.retentions.values()),
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
        )

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

"""What the coordinator measures of tasks and switches that pass it."""

from dataclasses import replace

from comm_pool.layout import Group, Mode, Rank
from coordinator.core.views import switch_view
from coordinator.model.events import Effect, GatewaySent, RankReported, ToGateway, ToRank
from coordinator.model.records import Outcome, SwitchRecord
from coordinator.protocol.messages.gateway import Cancel, Resubmit, Submit, TaskFailed
from coordinator.protocol.messages.rank import PageReport, Place, Report
from coordinator.protocol.messages.tasks import TaskHeader, TaskReturned
from coordinator.protocol.metrics_wire import Growing, Measure
from coordinator.protocol.terms import Binding, Carry, Phase, ReturnCause, Stage, TaskId, Tier
from coordinator.telemetry.core_metrics import (
    FAILURE_REASONS,
    FAILURES,
    LAYOUT_PAIRS_MAX,
    PHASES,
    QUEUE_WAIT,
    RECOMPUTED,
    REQUEUED,
    RESHARD_BYTES,
    SETTLE_MS,
    SWITCH_DURATION,
    SWITCH_STALL,
    SWITCH_TASKS,
    SWITCHES,
    CoreMetrics,
)

RECORD = SwitchRecord(3, "dp2", "tp2", "operator", Carry.RESHARD, 100, 0, total_ms=40)
BINDING = Binding(Group((Rank(0),), Mode.DP), 1)


def header(name: str) -> TaskHeader:
    return TaskHeader(TaskId(name), "g", "tcp://here", 3, 9, Tier.INTERACTIVE)


def placed(name: str) -> Effect:
    return ToRank(Rank(0), Place(header(name), 1, BINDING, b""))


def series(watcher: CoreMetrics, measure: Measure) -> dict[tuple[str, ...], Growing]:
    return watcher.tally.series_of(measure)


def counted(watcher: CoreMetrics, measure: Measure) -> dict[tuple[str, ...], Growing]:
    """The series in which something was counted."""
    return {labels: each for labels, each in series(watcher, measure).items() if each.value}


def watcher_of(*switches: SwitchRecord) -> CoreMetrics:
    return CoreMetrics(lambda: [dict(switch_view(each)) for each in switches])


def test_series_exist_before_anything_is_measured() -> None:
    watcher = watcher_of()
    tiers = {tier for (tier,) in series(watcher, QUEUE_WAIT)}
    assert tiers == {tier.name.lower() for tier in Tier}
    assert {phase for (phase,) in series(watcher, SWITCH_DURATION)} == set(PHASES)
    assert {carry for (carry,) in series(watcher, SWITCH_TASKS)} == set(Carry)
    assert {code for (code,) in series(watcher, FAILURES)} == {*FAILURE_REASONS, "other"}
    for measure in (QUEUE_WAIT, SWITCH_DURATION, SWITCH_TASKS, FAILURES, SWITCH_STALL):
        assert series(watcher, measure)
        assert not counted(watcher, measure)


def test_waits_are_told_once_and_by_tier() -> None:
    watcher = watcher_of()
    watcher.saw_event(GatewaySent("g", Submit(header("a"), b"")), 1_000)
    watcher.saw_event(GatewaySent("g", Submit(header("b"), b"")), 1_000)
    watcher.saw_event(GatewaySent("g", Cancel(TaskId("b"))), 1_100)
    for now_ms in (1_250, 9_000):
        watcher.saw_effect(placed("a"), now_ms)
        watcher.saw_effect(placed("b"), now_ms)
    ((tier, growing),) = counted(watcher, QUEUE_WAIT).items()
    assert tier == ("interactive",)
    assert (growing.value, sum(growing.counts)) == (0.25, 1)


def returned(name: str, cause: ReturnCause) -> RankReported:
    pages = PageReport(1, 1, 0, 0)
    report = Report(
        *(Rank(0), 1, 0, Stage(1, Phase.SERVE), BINDING, None, pages),
        returned=(TaskReturned(TaskId(name), 1, cause, (5, 6)),),
    )
    return RankReported(Rank(0), report)


def again(name: str) -> Effect:
    return ToRank(Rank(0), Place(header(name), 2, BINDING, b"", (5, 6)))


def test_tasks_that_come_back_are_counted_and_what_they_cost() -> None:
    watcher = watcher_of()
    assert {reason for (reason,) in series(watcher, REQUEUED)} == {*ReturnCause, "rank_lost"}
    for name, cause in (
        *(("a", ReturnCause.RECOMPUTE), ("b", ReturnCause.NOT_STARTED)),
        *(("c", ReturnCause.RECOMPUTE), ("e", ReturnCause.STALE)),
    ):
        watcher.saw_event(returned(name, cause), 0)
    watcher.saw_effect(ToGateway("g", Resubmit(TaskId("d"), 1)), 0)
    watcher.saw_event(GatewaySent("g", Cancel(TaskId("c"))), 0)
    for name in "abcde" * 2:
        watcher.saw_effect(again(name), 0)
    counts = {reason: each.value for (reason,), each in series(watcher, REQUEUED).items()}
    assert counts == {"recompute": 2, "not_started": 1, "stale": 1, "rank_lost": 1}
    # Of a and d: a prompt of 3 tokens, and 2 that were generated.
    assert series(watcher, RECOMPUTED)[()].value == 10


def test_failures_have_known_reasons() -> None:
    watcher = watcher_of()
    for code in ("queue_full", "whatever a leader says"):
        watcher.saw_effect(ToGateway("g", TaskFailed(TaskId("a"), code, "")), 0)
    assert set(counted(watcher, FAILURES)) == {("queue_full",), ("other",)}


def test_a_switch_is_counted_at_once_and_measured_when_all_is_known() -> None:
    ended = replace(RECORD, outcome=Outcome.SERVED)
    late = replace(ended, gap_ms_max=30.0, reshard_ms=20.0, reshard_bytes=5_000, swap_ms=1.0)
    watcher = watcher_of(late)
    watcher.switch_ended(ended, 1_000)
    watcher.settle(1_000 + SETTLE_MS - 1)
    assert series(watcher, SWITCHES)["dp2", "tp2", "served"].value == 1
    assert not counted(watcher, SWITCH_DURATION)
    for _ in range(2):
        watcher.settle(1_000 + SETTLE_MS)
    durations = counted(watcher, SWITCH_DURATION)
    phases = {phase: each.value for (phase,), each in durations.items()}
    assert phases == {"reshard": 0.02, "swap": 0.001, "total": 0.04}
    assert series(watcher, SWITCH_STALL)[()].value == 0.03
    assert series(watcher, RESHARD_BYTES)[()].value == 5_000
    assert watcher.reshard_bytes_per_s == 250_000


def test_layout_names_do_not_grow_without_bound() -> None:
    watcher = watcher_of()
    for number in range(LAYOUT_PAIRS_MAX + 100):
        record = replace(RECORD, epoch=number, to_layout=f"dp{number}", outcome=Outcome.SERVED)
        watcher.switch_ended(record, 0)
    assert len(series(watcher, SWITCHES)) == LAYOUT_PAIRS_MAX + 1
    assert series(watcher, SWITCHES)["other", "other", "served"].value == 100

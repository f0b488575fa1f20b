"""The coordinator's own metrics: queue waits, failures, switches. Pure.

It observes the core's events and effects, and changes nothing. Measurements of ranks and gateways
arrive after a switch has ended, so a switch is measured `SETTLE_MS` later.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from coordinator.model.events import Effect, Event, GatewaySent, RankReported, ToGateway, ToRank
from coordinator.model.records import SwitchRecord
from coordinator.protocol.messages.gateway import Cancel, Done, Resubmit, Submit, TaskFailed
from coordinator.protocol.messages.rank import Place
from coordinator.protocol.metrics_wire import Measure, Tally
from coordinator.protocol.terms import Carry, ReturnCause, TaskId

SETTLE_MS = 3_000
"""Time after a switch's end at which its measurements count as complete."""

WAITING_MAX = 65_536
"""Tasks whose arrival is remembered, at most."""

WAIT_BOUNDS_S: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0),
)
SWITCH_BOUNDS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)

QUEUE_WAIT: Final = Measure(
    "aileron_queue_wait_seconds",
    "Time from a task's arrival in the pool to its first placement.",
    ("tier",),
    WAIT_BOUNDS_S,
)
FAILURES: Final = Measure(
    "aileron_task_failures", "Tasks that the coordinator ended with an error.", ("reason",)
)
REQUEUED: Final = Measure(
    "aileron_tasks_requeued",
    "Tasks that queue again after their group lost or returned them, by reason.",
    ("reason",),
)
RECOMPUTED: Final = Measure(
    "aileron_recomputed_tokens",
    "Tokens of tasks placed again after their KV was lost or given up, prefix hits included.",
)
SWITCHES: Final = Measure("aileron_switch", "Switches that ended.", ("from", "to", "outcome"))
SWITCH_DURATION: Final = Measure(
    "aileron_switch_duration_seconds",
    "Duration of switches by phase, of the slowest rank; phases without work are omitted.",
    ("phase",),
    SWITCH_BOUNDS_S,
)
SWITCH_STALL: Final = Measure(
    "aileron_switch_stall_seconds",
    "Longest pause of any client's stream in a switch.",
    (),
    SWITCH_BOUNDS_S,
)
SWITCH_TASKS: Final = Measure(
    "aileron_switch_tasks", "Running tasks by what a switch did to them.", ("carry",)
)
RESHARD_BYTES: Final = Measure("aileron_reshard_bytes", "KV bytes that moves pulled from peers.")
PRECOPY_BYTES: Final = Measure(
    "aileron_precopy_bytes", "KV bytes that ranks pulled from peers before they left their groups."
)
PRECOPY_ROUNDS: Final = Measure(
    "aileron_precopy_rounds", "Rounds in which ranks copied KV before they left their groups."
)

PHASES: Final = {
    "decide": "decide_ms",
    "precopy": "precopy_ms",
    "park": "park_ms",
    "reshard": "reshard_ms",
    "swap": "swap_ms",
    "first_step": "first_step_ms",
    "cut_over": "cut_over_ms",
    "total": "total_ms",
}
"""Phase -> field of a switch."""

RANK_LOST: Final = "rank_lost"
"""Reason of a task that its gateway has to submit again: its rank, or the rank's link to the
gateway, is lost. See `ReturnCause` for others."""

OTHER: Final = "other"
"""Label of what has no name of its own."""

LAYOUT_PAIRS_MAX = 256
"""Pairs of layouts counted by name, at most; further pairs count as "other"."""

FAILURE_REASONS: Final = frozenset(
    {
        *("context_length_exceeded", "deadline_exceeded", "internal_error", "invalid_value"),
        *("no_healthy_workers", "not_serving", "queue_full", "switching_timeout"),
        *("tier_capacity", "worker_lost"),
    }
)


class CoreMetrics:
    """Metrics of one coordinator since its start."""

    def __init__(self, switches: Callable[[], list[dict[str, Any]]]) -> None:
        """`switches` returns the newest switches as the admin API shows them."""
        self._switches = switches
        self._arrived: OrderedDict[TaskId, tuple[int, str]] = OrderedDict()
        self._again: set[TaskId] = set()
        """Tasks that queue again, without the KV that they had."""
        self._unsettled: dict[int, int] = {}
        self._pairs: set[tuple[str, str]] = set()
        self.tally = Tally()
        self.tally.begin(QUEUE_WAIT, RECOMPUTED, SWITCH_STALL, RESHARD_BYTES)
        self.tally.begin(PRECOPY_BYTES, PRECOPY_ROUNDS)
        for measure, names in (
            (REQUEUED, (*ReturnCause, RANK_LOST)),
            (FAILURES, (*sorted(FAILURE_REASONS), OTHER)),
            (SWITCH_DURATION, PHASES),
            (SWITCH_TASKS, Carry),
        ):
            for name in names:
                self.tally.count(measure, str(name), by=0)
        self.reshard_bytes_per_s = 0.0
        """The speed of the last switch that migrated KV."""

    def saw_event(self, event: Event, now_ms: int) -> None:
        """Record when tasks arrive, return and end."""
        match event:
            case GatewaySent(message=Submit(header=header, attempt=0)):
                arrival = (now_ms, header.tier.name.lower())
                self._arrived.setdefault(header.task, arrival)
                while len(self._arrived) > WAITING_MAX:
                    self._arrived.popitem(last=False)
            case GatewaySent(message=Cancel(task) | Done(task)):
                self._gone(task)
            case RankReported(report=report):
                for returned in report.returned:
                    lost_kv = returned.cause is ReturnCause.RECOMPUTE
                    self._on_requeue(returned.task, str(returned.cause), lost_kv=lost_kv)
            case _:
                pass

    def _gone(self, task: TaskId) -> None:
        self._arrived.pop(task, None)
        self._again.discard(task)

    def _on_requeue(self, task: TaskId, reason: str, *, lost_kv: bool) -> None:
        self.tally.count(REQUEUED, reason)
        if lost_kv and len(self._again) < WAITING_MAX:
            self._again.add(task)

    def saw_effect(self, effect: Effect, now_ms: int) -> None:
        """Measure placements and failures."""
        match effect:
            case ToRank(message=Place(header=header, generated_tokens=generated)):
                arrived_ms, tier = self._arrived.pop(header.task, (0, ""))
                if tier:
                    self.tally.observe(QUEUE_WAIT, (now_ms - arrived_ms) / 1_000, tier)
                if header.task in self._again:
                    self._again.discard(header.task)
                    self.tally.count(RECOMPUTED, by=header.prompt_tokens + len(generated))
            case ToGateway(message=Resubmit(task=task)):
                self._on_requeue(task, RANK_LOST, lost_kv=True)
            case ToGateway(message=TaskFailed(task=task, code=code)):
                self._gone(task)
                self.tally.count(FAILURES, code if code in FAILURE_REASONS else OTHER)
            case _:
                pass

    def switch_ended(self, record: SwitchRecord, now_ms: int) -> None:
        """Count a switch now; `settle` measures it once its measurements are complete."""
        pair = (record.from_layout or "none", record.to_layout)
        if pair not in self._pairs and len(self._pairs) >= LAYOUT_PAIRS_MAX:
            pair = (OTHER, OTHER)
        self._pairs.add(pair)
        self.tally.count(SWITCHES, *pair, record.outcome.value.replace(" ", "_"))
        self._unsettled[record.epoch] = now_ms + SETTLE_MS

    def settle(self, now_ms: int) -> None:
        """Measure the switches that ended long enough ago; called at intervals."""
        due = {epoch for epoch, at_ms in self._unsettled.items() if at_ms <= now_ms}
        if not due:
            return
        for epoch in due:
            del self._unsettled[epoch]
        for switch in self._switches():
            if switch["epoch"] in due:
                self._measure(switch)

    def _measure(self, switch: Mapping[str, Any]) -> None:
        for phase, name in PHASES.items():
            # A cut-over may take no time; any other phase with 0 did not happen.
            if switch[name] or (phase == "cut_over" and switch[name] is not None):
                self.tally.observe(SWITCH_DURATION, switch[name] / 1_000, phase)
        if switch["gap_ms_max"] > 0:
            self.tally.observe(SWITCH_STALL, switch["gap_ms_max"] / 1_000)
        for carry, count in switch["tasks"].items():
            self.tally.count(SWITCH_TASKS, carry, by=count)
        self.tally.count(PRECOPY_BYTES, by=switch["precopy_bytes"])
        self.tally.count(PRECOPY_ROUNDS, by=switch["precopy_rounds"])
        if switch["reshard_bytes"] and switch["reshard_ms"]:
            self.tally.count(RESHARD_BYTES, by=switch["reshard_bytes"])
            self.reshard_bytes_per_s = switch["reshard_bytes"] / switch["reshard_ms"] * 1_000

"""Spans of the coordinator: how long traced tasks queue, and the course of each switch.

It observes the core's events and effects, as `core_metrics` does, and changes nothing. A task
queues once per placement, also after a switch or a lost rank returns it. A switch is a trace of its
own with links to the traced tasks that it met. It is exported `SETTLE_MS` after its end, when the
measurements of ranks and gateways have arrived. Created only if tracing is on.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from coordinator.model.events import (
    Effect,
    Event,
    GatewaySent,
    RankReported,
    SwitchRecorded,
    Tick,
    ToGateway,
    ToRank,
)
from coordinator.model.records import SwitchRecord
from coordinator.protocol.messages.gateway import Cancel, Done, Resubmit, Submit, TaskFailed
from coordinator.protocol.messages.rank import Place
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId
from coordinator.protocol.trace_context import TraceContext, read_traceparent
from coordinator.protocol.tracing import Span, Tracing, ago_ns
from coordinator.telemetry.core_metrics import FAILURE_REASONS, PHASES, RANK_LOST, SETTLE_MS

TASKS_MAX: Final = 16_384
"""Traced tasks to follow, at most; the oldest are forgotten."""
ENDED_TASKS_MAX: Final = 256
"""Ended tasks to remember, at most."""
LINKS_MAX: Final = 64
"""Tasks that a switch's span links to, at most."""
SWITCHES_MAX: Final = 100
"""Newest switches in which an ended one is looked up."""

CANCELLED: Final = "cancelled"
ARRIVED: Final = "arrived"
"""Why a task queues; other reasons are `RANK_LOST` and those of `ReturnCause`."""


@dataclass(slots=True)
class _Known:
    """A traced task; `queueing` is its span while it waits for a group."""

    header: TaskHeader
    queueing: Span | None
    placed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    """A switch that has ended."""

    record: SwitchRecord
    met: tuple[TraceContext, ...]
    due_ms: int


class CellSpans:
    """Makes the spans; `switches` returns the newest switches as the admin API shows them."""

    def __init__(self, tracing: Tracing, switches: Callable[[], Mapping[str, Any]]) -> None:
        self._tracing = tracing
        self._switches = switches
        self._tasks: OrderedDict[TaskId, _Known] = OrderedDict()
        self._ended_tasks: deque[tuple[int, _Known]] = deque(maxlen=ENDED_TASKS_MAX)
        """Recently ended tasks, with the time: a switch may have met them."""
        self._ended: list[_Ended] = []

    def saw_event(self, event: Event, now_ms: int) -> None:
        """Record when tasks arrive, return and end."""
        match event:
            case GatewaySent(message=Submit(header=header)) if header.trace:
                self._on_submit(header)
            case GatewaySent(message=Cancel(task)):
                self._gone(task, CANCELLED, now_ms)
            case GatewaySent(message=Done(task)):
                self._gone(task, "", now_ms)
            case RankReported(report=report):
                for returned in report.returned:
                    self._queues(returned.task, str(returned.cause))
            case Tick():
                self._settle(now_ms)
            case _:
                pass

    def saw_effect(self, effect: Effect, now_ms: int) -> None:
        """Record placements, failures and switches."""
        match effect:
            case ToRank(message=Place(header=header) as place) if header.trace:
                self._placed(place, now_ms)
            case ToGateway(message=TaskFailed(task=task, code=code)):
                self._gone(task, code if code in FAILURE_REASONS else "other", now_ms)
            case ToGateway(message=Resubmit(task=task)):
                self._queues(task, RANK_LOST)
            case SwitchRecorded(record):
                self._ended.append(_Ended(record, self._met(record), now_ms + SETTLE_MS))
            case _:
                pass

    def close(self) -> None:
        """Export the remaining switches: the process ends."""
        self._settle(None)

    # ------------------------------------------------------------------ tasks

    def _on_submit(self, header: TaskHeader) -> None:
        if header.task in self._tasks:
            return  # A repetition, by a new session or after a loss.
        self._tasks[header.task] = _Known(header, self._queue_span(header, ARRIVED))
        while len(self._tasks) > TASKS_MAX:
            self._tasks.popitem(last=False)

    def _queues(self, task: TaskId, why: str) -> None:
        known = self._tasks.get(task)
        if known is not None and known.queueing is None:
            known.queueing = self._queue_span(known.header, why)

    def _queue_span(self, header: TaskHeader, why: str) -> Span:
        about = {"aileron.tier": header.tier.name.lower(), "aileron.queued_because": why}
        return self._tracing.start("queue", header.trace, about)

    def _placed(self, place: Place, now_ms: int) -> None:
        known = self._tasks.get(place.header.task)
        if known is None:
            return
        group = place.binding.group
        if known.queueing is not None:
            about: dict[str, str | int] = {"aileron.group": group.name}
            about |= {"aileron.leader": int(group.leader), "aileron.attempt": place.attempt}
            known.queueing.set(about)
            known.queueing.end()
            known.queueing = None
        if known.placed_ms is None:
            known.placed_ms = now_ms

    def _gone(self, task: TaskId, why: str, now_ms: int) -> None:
        known = self._tasks.pop(task, None)
        if known is None:
            return
        if known.queueing is not None:
            known.queueing.set({"aileron.left": why or "done"})
            known.queueing.end(error="" if why in ("", CANCELLED) else why)
        self._ended_tasks.append((now_ms, known))

    # ------------------------------------------------------------------ switches

    def _met(self, record: SwitchRecord) -> tuple[TraceContext, ...]:
        """Contexts of tasks that were in a group when the switch began."""
        found: list[TraceContext] = []
        recent = [known for end_ms, known in self._ended_tasks if end_ms >= record.started_ms]
        for known in (*self._tasks.values(), *recent):
            if known.placed_ms is not None and known.placed_ms <= record.started_ms:
                context = read_traceparent(known.header.trace)
                if context is not None and len(found) < LINKS_MAX:
                    found.append(context)
        return tuple(found)

    def _settle(self, now_ms: int | None) -> None:
        due = [each for each in self._ended if now_ms is None or each.due_ms <= now_ms]
        if not due:
            return
        self._ended = [each for each in self._ended if each not in due]
        views = {each["epoch"]: each for each in self._switches()["switches"]}
        for each in due:
            self._export(each, views.get(each.record.epoch, {}), now_ms)

    def _export(self, ended: _Ended, view: Mapping[str, Any], now_ms: int | None) -> None:
        record = ended.record
        ended_ms_ago = 0 if now_ms is None else now_ms - (ended.due_ms - SETTLE_MS)
        about: dict[str, str | int | float] = {
            "aileron.epoch": record.epoch,
            "aileron.switch.from": record.from_layout or "none",
            "aileron.switch.to": record.to_layout,
            "aileron.switch.cause": record.cause,
            "aileron.switch.carry": str(record.carry),
            "aileron.switch.outcome": str(record.outcome),
        }
        for phase, name in PHASES.items():
            if view.get(name):
                about[f"aileron.switch.{phase}_seconds"] = view[name] / 1_000
        if view.get("gap_ms_max", 0) > 0:
            about["aileron.switch.pause_seconds"] = view["gap_ms_max"] / 1_000
        if view.get("precopy_bytes", 0) > 0:
            about["aileron.switch.precopy_bytes"] = view["precopy_bytes"]
        if view.get("reshard_bytes", 0) > 0:
            about["aileron.switch.reshard_bytes"] = view["reshard_bytes"]
        for carry, count in view.get("tasks", {}).items():
            if count:
                about[f"aileron.switch.tasks.{carry}"] = count
        began_ns = ago_ns(ended_ms_ago + record.total_ms)
        span = self._tracing.start("switch", None, about, at_ns=began_ns, links=ended.met)
        span.end(at_ns=began_ns + int(record.total_ms * 1e6))

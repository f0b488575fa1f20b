"""Queueing and switches as spans, over events as the core sees them; the SDK is the real one."""

from collections.abc import Iterator
from typing import Any

import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.model.events import GatewaySent, SwitchRecorded, Tick, ToGateway, ToRank
from coordinator.model.records import Outcome, SwitchRecord
from coordinator.protocol.messages.gateway import Cancel, Done, Resubmit, Submit, TaskFailed
from coordinator.protocol.messages.rank import Place
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, Carry, TaskId
from coordinator.protocol.tracing import Tracing, start_tracing
from coordinator.protocol.tracing_config import TracingConfig
from coordinator.server.spans import CellSpans
from coordinator.telemetry.core_metrics import SETTLE_MS
from tests.harness.cells.collector import Collector, collector

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def told() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture
def tracing(told: Collector) -> Tracing:
    found = start_tracing(TracingConfig(endpoint=told.url), "coordinator")
    assert found is not None
    return found


def header(name: str, *, is_traced: bool = True) -> TaskHeader:
    trace = f"00-{TRACE}-b7ad6b7169203331-01" if is_traced else ""
    return TaskHeader(TaskId(name), "g", "tcp://g", 10, 20, trace=trace)


def submit(name: str, *, is_traced: bool = True) -> GatewaySent:
    return GatewaySent("g", Submit(header(name, is_traced=is_traced), b""))


def place(name: str, attempt: int = 1, *, is_traced: bool = True) -> ToRank:
    binding = Binding(Group((Rank(0), Rank(1)), Mode.TP), 1)
    return ToRank(Rank(0), Place(header(name, is_traced=is_traced), attempt, binding, b""))


def switches(*shown: dict[str, Any]) -> Any:
    return lambda: {"switches": list(shown)}


def test_each_wait_is_a_span_with_its_reason(told: Collector, tracing: Tracing) -> None:
    spans = CellSpans(tracing, switches())
    spans.saw_event(submit("a"), 0)
    spans.saw_event(submit("a"), 1)  # Said again.
    spans.saw_effect(place("a"), 5)
    spans.saw_effect(ToGateway("g", Resubmit(TaskId("a"), 1)), 9)
    spans.saw_event(submit("a"), 10)
    spans.saw_effect(place("a", attempt=2), 11)
    spans.saw_event(GatewaySent("g", Done(TaskId("a"))), 20)
    spans.saw_event(submit("b"), 30)
    spans.saw_event(GatewaySent("g", Cancel(TaskId("b"))), 31)
    spans.saw_event(submit("c"), 40)
    spans.saw_effect(ToGateway("g", TaskFailed(TaskId("c"), "queue_full", "full")), 41)
    spans.saw_event(submit("not traced", is_traced=False), 50)
    spans.saw_effect(place("not traced", is_traced=False), 51)
    tracing.close()
    assert {each.trace for each in told.spans} == {TRACE}
    assert {each.parent for each in told.spans} == {"b7ad6b7169203331"}
    found = sorted(told.spans, key=lambda each: each.began_ns)
    assert [each.name for each in found] == ["queue"] * 4
    why = [each.attributes["aileron.queued_because"] for each in found]
    assert why == ["arrived", "rank_lost", "arrived", "arrived"]
    assert [each.attributes["aileron.left"] for each in found[2:]] == ["cancelled", "queue_full"]
    assert [each.attributes.get("error.type") for each in found[2:]] == [None, "queue_full"]
    placed = found[1].attributes
    assert (placed["aileron.group"], placed["aileron.attempt"]) == ("tp2", 2)


def test_a_switch_names_what_it_met_and_what_was_measured_later(
    told: Collector, tracing: Tracing
) -> None:
    shown = {"epoch": 2, "park_ms": 4.0, "gap_ms_max": 30.0, "tasks": {"reshard": 2, "pause": 0}}
    rest = dict.fromkeys(("decide_ms", "reshard_ms", "swap_ms", "first_step_ms", "total_ms"), 0)
    spans = CellSpans(tracing, switches({**shown, **rest, "cut_over_ms": 0.0}))
    spans.saw_event(submit("met"), 0)
    spans.saw_effect(place("met"), 5)
    spans.saw_event(submit("waited"), 6)
    record = SwitchRecord(
        *(2, "dp2", "tp2", "operator", Carry.RESHARD, 100, 1), total_ms=50, outcome=Outcome.SERVED
    )
    # It ended before the switch did.
    spans.saw_event(GatewaySent("g", Done(TaskId("met"))), 140)
    spans.saw_effect(SwitchRecorded(record), 150)
    spans.saw_event(Tick(), 150 + SETTLE_MS - 1)
    spans.saw_event(Tick(), 150 + SETTLE_MS)
    spans.close()
    tracing.close()
    (switch,) = [each for each in told.spans if each.name == "switch"]
    assert switch.links == {TRACE} and switch.trace != TRACE
    assert switch.ended_ns - switch.began_ns == 50_000_000
    assert switch.attributes["aileron.switch.to"] == "tp2"
    assert switch.attributes["aileron.switch.park_seconds"] == pytest.approx(0.004)
    assert switch.attributes["aileron.switch.pause_seconds"] == pytest.approx(0.03)
    assert switch.attributes["aileron.switch.tasks.reshard"] == 2
    assert "aileron.switch.tasks.pause" not in switch.attributes


def test_what_is_not_settled_is_told_at_the_end(told: Collector, tracing: Tracing) -> None:
    spans = CellSpans(tracing, switches())
    record = SwitchRecord(2, "", "tp2", "start", Carry.RESHARD, 100, 1, total_ms=7)
    spans.saw_effect(SwitchRecorded(record), 150)
    spans.close()
    tracing.close()
    (switch,) = told.spans
    assert switch.attributes["aileron.switch.from"] == "none"

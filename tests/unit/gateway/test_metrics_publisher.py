"""Which cell is told what a gateway has measured, and that the cells' sums come out right."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from coordinator.protocol.metrics_wire import (
    REQUESTS,
    TOKENS,
    TTFT,
    Family,
    Measure,
    Measures,
    Series,
    Tally,
)
from coordinator.protocol.terms import Tier
from coordinator.telemetry.metrics_aggregator import MetricsAggregator
from gateway.errors import RequestState
from gateway.fleet.placement import preferred
from gateway.fleet.roster import FORGOTTEN_AFTER_S, CellRoster
from gateway.telemetry.meter import RequestMeter
from gateway.telemetry.metrics_publisher import (
    PUBLISH_TICKS,
    USAGE_TICKS,
    DeltaTracker,
    MetricsPublisher,
)

OK = ("/v1/completions", "batch", "200")
CHAT = "/v1/chat/completions"


def total(aggregator: MetricsAggregator, measure: Measure) -> float:
    return sum(each.value for each in aggregator.tally.series_of(measure).values())


def test_the_next_coordinator_is_told_only_what_the_last_one_was_not() -> None:
    tally, telling = Tally(), DeltaTracker()
    tally.count(REQUESTS, *OK, by=5)
    first, second = MetricsAggregator(), MetricsAggregator()
    telling.give("c1", tally.families())
    first.take("g", telling.message("c1"))
    tally.count(REQUESTS, *OK, by=2)
    tally.observe(TTFT, 0.1, "batch", "chat")
    for _ in range(2):
        telling.give("c2", tally.families())
        second.take("g", telling.message("c2"))
    assert total(first, REQUESTS) == 5
    assert total(second, REQUESTS) == 2
    assert sum(second.tally.series_of(TTFT)["batch", "chat"].counts) == 1


@pytest.mark.parametrize("grown", [1, 5, 9])
def test_a_coordinator_that_is_told_again_goes_on_from_what_it_has(grown: int) -> None:
    """There and back: neither is what grew meanwhile told twice, nor the first message lost."""
    tally, telling = Tally(), DeltaTracker()
    cells = {"a": MetricsAggregator(), "b": MetricsAggregator()}
    for coordinator, by in (("a", 5), ("b", 3), ("a", grown), ("a", 1), ("b", grown)):
        tally.count(REQUESTS, *OK, by=by)
        tally.observe(TTFT, 0.1 * by, "batch", "chat")
        telling.give(coordinator, tally.families())
        cells[coordinator].take("g", telling.message(coordinator))
    assert total(cells["a"], REQUESTS) == 5 + grown + 1
    assert total(cells["b"], REQUESTS) == 3 + grown
    assert sum(cells["a"].tally.series_of(TTFT)["batch", "chat"].counts) == 3


def test_a_message_that_is_lost_is_in_the_next_one() -> None:
    tally, telling, aggregator = Tally(), DeltaTracker(), MetricsAggregator()
    for number in range(6):
        tally.count(REQUESTS, *OK)
        telling.give("c", tally.families())
        if number % 2:
            aggregator.take("g", telling.message("c"))
    assert total(aggregator, REQUESTS) == 6


@dataclass
class Heard:
    """A session with a cell, and what its coordinator adds up."""

    coordinator: str
    aggregator: MetricsAggregator = field(default_factory=MetricsAggregator)
    messages: int = 0

    def send(self, message: Measures) -> None:
        self.messages += 1
        self.aggregator.take("g", message)


class Cells:
    """A fleet whose first cell that is up is home."""

    def __init__(self, *names: str) -> None:
        self.cells = CellRoster(names, 1.0, in_fleet=True)
        self.heard = {name: Heard(f"coordinator of {name}") for name in names}
        for name in names:
            self.cells.opened(name)

    @property
    def home(self) -> Heard | None:
        return self.session(self.cells.up[0]) if self.cells.up else None

    def session(self, cell: str) -> Heard | None:
        return self.heard[cell] if cell in self.cells.up else None

    def totals(self, measure: Measure) -> dict[str, float]:
        return {name: total(each.aggregator, measure) for name, each in self.heard.items()}


def no_engine() -> Iterable[Family]:
    return ()


def tell(teller: MetricsPublisher) -> None:
    for _ in range(PUBLISH_TICKS):
        teller.tick()


def test_each_cell_is_told_its_own_streams_and_one_of_them_the_rest() -> None:
    cells, meter = Cells("a", "b", "c"), RequestMeter()
    teller = MetricsPublisher(cells, meter, no_engine)
    for turn in range(1, 4):
        meter.of("a").count(TOKENS, "batch", by=10)
        meter.of("b").count(TOKENS, "batch", by=7)
        meter.answered(CHAT, Tier.BATCH, 200, "", 1.0)
        tell(teller)
        assert cells.totals(TOKENS) == {"a": 10 * turn, "b": 7 * turn, "c": 0}
        assert cells.totals(REQUESTS) == {"a": turn, "b": 0, "c": 0}
    assert cells.heard["a"].messages == 3, "one message for both"
    assert cells.heard["c"].messages == 0


def test_what_a_stream_and_no_stream_measured_is_added_up_at_home() -> None:
    cells, meter = Cells("a"), RequestMeter()
    teller = MetricsPublisher(cells, meter, no_engine)
    for by in (1, 2):
        meter.of("a").count(TOKENS, "batch", by=by)
        meter.of(None).count(TOKENS, "batch", by=by)
        tell(teller)
    assert cells.totals(TOKENS) == {"a": 6}


def test_cells_that_come_and_go_lose_nothing() -> None:
    cells, meter = Cells("a", "b"), RequestMeter()
    teller = MetricsPublisher(cells, meter, no_engine)
    for number in range(9):
        if number in (2, 6):
            cells.cells.closed("a", 0.0)
        elif number in (4, 8):
            cells.cells.opened("a")
        meter.of("a").count(TOKENS, "batch", by=3)
        meter.of("b").count(TOKENS, "batch", by=5)
        meter.answered(CHAT, Tier.BATCH, 200, "", 1.0)
        tell(teller)
    assert cells.totals(TOKENS) == {"a": 27, "b": 45}, "what nobody heard is told later"
    assert cells.totals(REQUESTS) == {"a": 5, "b": 4}, "the other one was home meanwhile"


def test_what_a_cell_that_is_gone_for_good_was_not_told_goes_home() -> None:
    cells, meter = Cells("a", "b"), RequestMeter()
    teller = MetricsPublisher(cells, meter, no_engine)
    meter.of("b").count(TOKENS, "batch", by=3)
    tell(teller)
    cells.cells.closed("b", 0.0)
    meter.of("b").count(TOKENS, "batch", by=4)
    tell(teller)
    assert cells.totals(TOKENS) == {"a": 0, "b": 3}
    cells.cells.found(["a"], 0.0)
    assert cells.cells.forget((), FORGOTTEN_AFTER_S) == ["b"]
    for _ in range(2):
        tell(teller)
        assert cells.totals(TOKENS) == {"a": 4, "b": 3}
    assert meter.by_cell() == []


def test_without_a_session_nobody_is_told_and_all_of_it_later() -> None:
    cells, meter = Cells("a"), RequestMeter()
    teller = MetricsPublisher(cells, meter, no_engine)
    cells.cells.closed("a", 0.0)
    meter.of("a").count(TOKENS, "batch", by=3)
    meter.answered(CHAT, Tier.BATCH, 200, "", 1.0)
    tell(teller)
    assert cells.heard["a"].messages == 0
    cells.cells.opened("a")
    tell(teller)
    assert (cells.totals(TOKENS), cells.totals(REQUESTS)) == ({"a": 3}, {"a": 1})


def test_the_front_ends_own_metrics_go_to_one_cell() -> None:
    cells, reads = Cells("a", "b"), 0

    def engine() -> Iterable[Family]:
        nonlocal reads
        reads += 1
        yield Family("vllm:request_success", "Done.", (), (), (Series((), 2.0 * reads),))

    teller = MetricsPublisher(cells, RequestMeter(), engine)
    for _ in range(3):
        tell(teller)
    success = Measure("vllm:request_success", "Done.")
    assert reads == 3
    assert cells.totals(success) == {"a": 6.0, "b": 0}


def test_gateways_have_different_homes_which_they_keep() -> None:
    cells = [f"10.0.0.{number}:9000" for number in range(4)]
    homes = {f"gateway-{number}": preferred(f"gateway-{number}", cells) for number in range(200)}
    for cell in cells:
        assert 25 <= list(homes.values()).count(cell) <= 75
        left = [each for each in cells if each != cell]
        moved = [name for name, home in homes.items() if preferred(name, left) != home]
        assert {homes[name] for name in moved} == {cell}, "the others stay at home"


def requests_of(cells: Cells) -> dict[str, dict[str, int]]:
    """Cell -> tenant -> requests."""
    return {
        name: {
            row.tenant: row.counts["requests"]
            for row in each.aggregator.usage.rows("day", 1, None, 0.0)
        }
        for name, each in cells.heard.items()
    }


def test_usage_goes_to_the_cell_that_computed_it_and_what_is_left_of_a_lost_one_home() -> None:
    cells, meter = Cells("a", "b"), RequestMeter(tenants_max=2)
    teller = MetricsPublisher(cells, meter, no_engine)
    of_b, refused = RequestState(), RequestState()
    of_b.cell = "b"
    for tenant in ("acme", "", "third"):
        meter.tenants.used(tenant, Tier.BATCH, of_b)
    meter.tenants.used("acme", Tier.BATCH, refused)
    assert requests_of(cells) == {"a": {}, "b": {}}
    for _ in range(USAGE_TICKS):
        teller.tick()
    of_cell_b = {"acme": 1, "anonymous": 1, "other": 1}
    assert requests_of(cells) == {"a": {"acme": 1}, "b": of_cell_b}
    cells.cells.closed("b", 0.0)
    meter.tenants.used("acme", Tier.BATCH, of_b)
    teller.publish()
    assert requests_of(cells) == {"a": {"acme": 1}, "b": of_cell_b}
    cells.cells.found(["a"], 0.0)
    assert cells.cells.forget((), FORGOTTEN_AFTER_S) == ["b"]
    for _ in range(2):
        teller.publish()
        assert requests_of(cells) == {"a": {"acme": 2}, "b": of_cell_b}
    assert meter.tenants.by_cell() == []

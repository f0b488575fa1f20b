"""What gateways measured, added up over gateways, sessions and coordinators."""

from itertools import product

from coordinator.protocol.metrics_wire import (
    OWN,
    REQUESTS,
    TTFT,
    Family,
    Measures,
    Series,
    Tally,
    quantile,
)
from coordinator.telemetry.metrics_aggregator import SERIES_MAX, MetricsAggregator


def told(tally: Tally) -> Measures:
    return Measures(tally.families())


def requests(aggregator: MetricsAggregator) -> dict[tuple[str, ...], float]:
    return {key: each.value for key, each in aggregator.tally.series_of(REQUESTS).items()}


def test_several_gateways_add_up_and_repetitions_do_not() -> None:
    one, other, aggregator = Tally(), Tally(), MetricsAggregator()
    one.count(REQUESTS, "/v1/completions", "batch", "200", by=3)
    other.count(REQUESTS, "/v1/completions", "batch", "200", by=4)
    for _ in range(3):
        aggregator.take("one", told(one))
        aggregator.take("other", told(other))
    assert requests(aggregator) == {("/v1/completions", "batch", "200"): 7}
    one.count(REQUESTS, "/v1/completions", "batch", "200")
    aggregator.take("one", told(one))
    assert requests(aggregator) == {("/v1/completions", "batch", "200"): 8}


def test_histograms_add_up_bucket_by_bucket() -> None:
    one, other, aggregator = Tally(), Tally(), MetricsAggregator()
    for seconds in (0.0005, 0.03, 1000.0):
        one.observe(TTFT, seconds, "standard", "chat")
    other.observe(TTFT, 0.03, "standard", "chat")
    aggregator.take("one", told(one))
    aggregator.take("other", told(other))
    growing = aggregator.tally.series_of(TTFT)["standard", "chat"]
    assert sum(growing.counts) == 4
    assert (growing.counts[0], growing.counts[-1]) == (1, 1)
    assert growing.counts[TTFT.bounds.index(0.04)] == 2
    assert growing.value == 0.0005 + 0.03 + 1000.0 + 0.03


def test_series_exist_before_anything_is_measured() -> None:
    aggregator = MetricsAggregator()
    known = {each.name: each.series for each in aggregator.tally.families()}
    open_labels = {each.name for each in OWN.values() if {"code", "reason"} & set(each.labels)}
    assert known.keys() == OWN.keys() - open_labels
    tiers, operations = ("interactive", "standard", "batch"), ("chat", "text_completion")
    assert [each.labels for each in known[TTFT.name]] == list(product(tiers, operations))
    for family in aggregator.tally.families():
        assert not any(each.value or any(each.counts) for each in family.series)
        assert {len(each.counts) for each in family.series} == {
            len(family.bounds) + bool(family.bounds)
        }
    one = Tally()
    one.observe(TTFT, 0.03, "standard", "chat")
    aggregator.take("one", told(one))
    assert sum(aggregator.tally.series_of(TTFT)["standard", "chat"].counts) == 1


def test_what_is_unknown_or_too_much_is_not_taken() -> None:
    aggregator = MetricsAggregator()
    before = aggregator.tally.families()
    foreign = Family("node_cpu_seconds", "x", (), (), (Series((), 1.0),))
    twisted = Family(REQUESTS.name, "x", ("prompt",), (), (Series(("secret",), 1.0),))
    long = Family("vllm:request_success", "x", ("reason",), (), (Series(("r" * 65,), 1.0),))
    uneven = Family("vllm:e2e", "x", (), (1.0,), (Series((), 1.0, (1,)),))
    aggregator.take("g", Measures((foreign, twisted, long, uneven)))
    assert [each for each in aggregator.tally.families() if each.series] == list(before)
    many = tuple(Series((str(number),), 1.0) for number in range(SERIES_MAX + 50))
    aggregator.take("g", Measures((Family("vllm:many", "x", ("n",), (), many),)))
    (family,) = [each for each in aggregator.tally.families() if each.name == "vllm:many"]
    assert len(family.series) == SERIES_MAX


def test_totals_never_fall() -> None:
    aggregator = MetricsAggregator()
    for value in (5.0, 2.0, 3.0):
        family = Family(REQUESTS.name, "", REQUESTS.labels, (), (Series(("a", "b", "c"), value),))
        aggregator.take("g", Measures((family,)))
    assert requests(aggregator) == {("a", "b", "c"): 6.0}


def test_quantiles_are_those_of_promql() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, (0, 0, 0, 0), 0.5) is None
    assert quantile(bounds, (10, 0, 0, 0), 0.5) == 0.5
    assert quantile(bounds, (5, 5, 0, 0), 0.75) == 1.5
    assert quantile(bounds, (0, 0, 1, 9), 0.99) == 4.0

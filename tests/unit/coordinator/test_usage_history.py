"""The usage of tenants: by hour and by day, within bounds."""

from coordinator.protocol.metrics_wire import (
    OTHER_TENANTS,
    TENANT_OUTPUT_TOKENS,
    TENANT_PROMPT_TOKENS,
    TENANT_REQUESTS,
    Family,
    Measures,
    Series,
    Tally,
)
from coordinator.telemetry.metrics_aggregator import USAGE_SERIES_MAX, MetricsAggregator
from coordinator.telemetry.usage_history import DAY_S, HOUR_S, HOURS_MAX, By, UsageHistory

NOON_S = 20_000 * DAY_S + 12 * HOUR_S


def counted(
    history: UsageHistory, by: By, now_s: float, last: int = 1_000
) -> list[tuple[int, str, int]]:
    rows = history.rows(by, last, None, now_s)
    return [(row.begin_s, row.tenant, row.counts["requests"]) for row in rows]


def test_hours_and_days_are_counted_apart() -> None:
    history = UsageHistory(8, 3)
    for at_s in (NOON_S, NOON_S + HOUR_S - 1, NOON_S + HOUR_S, NOON_S + DAY_S):
        history.add(TENANT_REQUESTS, ("acme", "batch"), 1, at_s)
    now_s = NOON_S + DAY_S
    hours = [(NOON_S, "acme", 2), (NOON_S + HOUR_S, "acme", 1), (now_s, "acme", 1)]
    midnight_s = NOON_S - 12 * HOUR_S
    assert counted(history, "hour", now_s) == hours
    assert counted(history, "hour", now_s, last=1) == hours[2:]
    assert counted(history, "day", now_s) == [
        (midnight_s, "acme", 3),
        (midnight_s + DAY_S, "acme", 1),
    ]


def test_old_hours_and_days_are_forgotten() -> None:
    history = UsageHistory(8, 2)
    history.add(TENANT_REQUESTS, ("acme", "batch"), 1, NOON_S)
    assert counted(history, "day", NOON_S + DAY_S)
    assert counted(history, "hour", NOON_S + (HOURS_MAX - 1) * HOUR_S)
    assert not counted(history, "hour", NOON_S + HOURS_MAX * HOUR_S)
    assert not counted(history, "day", NOON_S + 2 * DAY_S)


def test_tenants_beyond_the_bound_are_one() -> None:
    history = UsageHistory(2, 2)
    for tenant in ("one", "two", "three", "four", "one"):
        history.add(TENANT_REQUESTS, (tenant, "batch"), 1, NOON_S)
    tenants = [(tenant, count) for _, tenant, count in counted(history, "day", NOON_S)]
    assert tenants == [("one", 2), (OTHER_TENANTS, 2), ("two", 1)]
    later_s = NOON_S + 2 * DAY_S
    history.add(TENANT_REQUESTS, ("three", "batch"), 1, later_s)
    assert [row[1] for row in counted(history, "day", later_s)] == ["three"]
    assert set(history.totals) == {(OTHER_TENANTS, "batch"), ("three", "batch")}


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    history = UsageHistory(2, 2)
    history.add(TENANT_REQUESTS, ("one", "batch"), 1, NOON_S)
    history.add(TENANT_REQUESTS, ("one", "batch"), 1, NOON_S - 3 * HOUR_S)
    assert counted(history, "hour", NOON_S) == [(NOON_S, "one", 2)]


def test_a_tenant_s_rows_are_found() -> None:
    history = UsageHistory(4, 2)
    history.add(TENANT_PROMPT_TOKENS, ("one", "batch"), 7, NOON_S)
    history.add(TENANT_OUTPUT_TOKENS, ("one", "batch"), 3, NOON_S)
    history.add(TENANT_OUTPUT_TOKENS, ("two", "batch"), 5, NOON_S)
    [row] = history.rows("day", 1, "one", NOON_S)
    assert (row.tier, row.counts) == (
        "batch",
        {"requests": 0, "prompt_tokens": 7, "cached_tokens": 0, "output_tokens": 3},
    )


def test_usage_grows_with_the_totals_of_gateways_and_is_no_metric() -> None:
    aggregator = MetricsAggregator(UsageHistory(8, 2), lambda: NOON_S)
    before = aggregator.tally.families()
    one, other = Tally(), Tally()
    one.count(TENANT_REQUESTS, "acme", "batch", by=3)
    other.count(TENANT_REQUESTS, "acme", "batch", by=4)
    for _ in range(3):
        aggregator.take("one", Measures(one.families()))
        aggregator.take("other", Measures(other.families()))
    one.count(TENANT_REQUESTS, "acme", "batch")
    aggregator.take("one", Measures(one.families()))
    assert [row[1:] for row in counted(aggregator.usage, "day", NOON_S)] == [("acme", 8)]
    assert aggregator.tally.families() == before


def test_unfit_series_of_a_gateway_are_ignored() -> None:
    aggregator = MetricsAggregator(UsageHistory(USAGE_SERIES_MAX + 9, 2), lambda: NOON_S)
    fit = [Series((f"t{number}", "batch"), 1.0) for number in range(USAGE_SERIES_MAX + 5)]
    unfit = Series(("x" * 65, "batch"), 1.0), Series(("lonely",), 1.0)
    measure = TENANT_REQUESTS
    series = (*unfit, *fit)
    aggregator.take("one", Measures((Family(measure.name, "", measure.labels, (), series),)))
    assert len(counted(aggregator.usage, "day", NOON_S)) == USAGE_SERIES_MAX - len(unfit)

"""What a gateway measures of streams and requests."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.metrics_wire import (
    DISCONNECTS,
    DURATION,
    ITL,
    REJECTIONS,
    REQUESTS,
    SLO_GOOD,
    SLO_TOTAL,
    TOKENS,
    TPOT,
    TTFT,
    Measure,
)
from coordinator.protocol.policy_config import SloTarget
from coordinator.protocol.terms import TaskId, Tier
from gateway.open_requests import OpenRequest
from gateway.telemetry.engine_metrics import engine_families
from gateway.telemetry.meter import CLIENT_GONE_STATUS, RequestMeter

TARGETS = {Tier.STANDARD: SloTarget(ttft_ms=500, tpot_ms=100)}


def task(name: str = "chatcmpl-1") -> OpenRequest:
    header = TaskHeader(TaskId(name), "g", "tcp://here", 3, 9, Tier.STANDARD)
    return OpenRequest(header, b"", opened_at_s=10.0)


def deliver(meter: RequestMeter, one: OpenRequest, *times: float) -> None:
    for now_s in times:
        meter.tokens(one, 1, now_s)
        one.delivered.append(7)
        one.last_token_at_s = now_s


def values(meter: RequestMeter, measure: Measure) -> dict[tuple[str, ...], float]:
    """What was measured, in whatever cell, or in none."""
    tallies = [meter.tally, *(tally for _, tally in meter.by_cell())]
    found = [each for tally in tallies for each in tally.series_of(measure).items()]
    assert len(dict(found)) == len(found), "nothing is measured twice"
    return {key: round(each.value, 6) for key, each in found}


def counted(meter: RequestMeter, measure: Measure) -> dict[tuple[str, ...], float]:
    return {labels: value for labels, value in values(meter, measure).items() if value}


def test_a_stream_is_timed_where_its_tokens_are_delivered() -> None:
    meter, one = RequestMeter(TARGETS), task()
    deliver(meter, one, 10.2, 10.3, 10.5)
    meter.ended(one, 10.5)
    assert values(meter, TTFT) == {("standard", "chat"): 0.2}
    assert values(meter, ITL) == {("standard",): 0.3}
    assert values(meter, TPOT) == {("standard", "chat"): 0.15}
    assert values(meter, TOKENS) == {("standard",): 3}
    assert values(meter, SLO_TOTAL) == {("standard",): 1}
    assert values(meter, SLO_GOOD) == {("standard",): 0}, "0.15 s per token are too many"


@pytest.mark.parametrize(
    ("times", "ended_s", "failed", "judged", "good"),
    [
        ((10.4, 10.45), 10.5, False, 1, 1),
        ((10.4,), 10.5, False, 1, 1),
        ((10.6,), 10.7, False, 1, 0),
        ((10.4, 10.7), 10.7, False, 1, 0),
        ((10.4, 10.45), 10.5, True, 1, 0),
        ((), 10.4, False, 0, 0),
        ((), 10.6, False, 1, 0),
        ((), 10.1, True, 1, 0),
    ],
    ids=["kept", "one", "late", "slow", "failed", "left early", "left late", "refused"],
)
def test_objectives(
    times: tuple[float, ...], ended_s: float, failed: bool, judged: int, good: int
) -> None:
    meter, one = RequestMeter(TARGETS), task()
    deliver(meter, one, *times)
    meter.ended(one, ended_s, failed=failed)
    assert values(meter, SLO_TOTAL).get(("standard",), 0) == judged
    assert values(meter, SLO_GOOD).get(("standard",), 0) == good


def test_a_stream_counts_for_the_cell_that_it_is_in() -> None:
    meter, one, lost = RequestMeter(TARGETS), task(), task("chatcmpl-2")
    one.cell, lost.cell = "a", None
    deliver(meter, one, 10.2, 10.3)
    one.cell = "b"
    deliver(meter, one, 10.6)
    meter.ended(one, 10.6)
    meter.ended(lost, 10.9, failed=True)

    def measured(cell: str | None) -> dict[str, float]:
        known = {each.name: each.series[0].value for each in meter.of(cell).families()}
        of_streams = (TOKENS, TTFT, ITL, TPOT, SLO_TOTAL, SLO_GOOD)
        return {each.name: round(known[each.name], 6) for each in of_streams if each.name in known}

    assert measured("a") == {TOKENS.name: 2, TTFT.name: 0.2, ITL.name: 0.1}
    assert measured("b") == {
        TOKENS.name: 1,
        ITL.name: 0.3,
        TPOT.name: 0.2,
        SLO_TOTAL.name: 1,
        SLO_GOOD.name: 0,
    }
    assert measured(None) == {SLO_TOTAL.name: 1, SLO_GOOD.name: 0}, "no cell ever had it"
    assert [cell for cell, _ in meter.by_cell()] == ["a", "b"]
    meter.forget("a")
    assert [cell for cell, _ in meter.by_cell()] == ["b"]


def test_children_and_completions_have_their_operation() -> None:
    meter = RequestMeter()
    for name in ("0_chatcmpl-9", "cmpl-chatcmpl-0"):
        deliver(meter, task(name), 10.1)
    assert set(values(meter, TTFT)) == {("standard", "chat"), ("standard", "text_completion")}


def test_answers_are_counted_by_what_they_were() -> None:
    meter, chat = RequestMeter(), "/v1/chat/completions"
    meter.answered(chat, Tier.BATCH, 200, "", 1.5)
    meter.answered(chat, Tier.BATCH, 429, "queue_full", 0.1)
    meter.answered(chat, Tier.BATCH, 500, "no code of ours", 0.1)
    meter.answered(chat, Tier.BATCH, CLIENT_GONE_STATUS, "", 0.1)
    assert counted(meter, REQUESTS) == {
        (chat, "batch", code): 1 for code in ("200", "429", "500", "499")
    }
    assert counted(meter, REJECTIONS) == {("queue_full", "batch"): 1, ("other", "batch"): 1}
    assert values(meter, DISCONNECTS) == {("batch",): 1}
    assert values(meter, DURATION) == {("batch", "chat"): 1.5}


def test_engine_metrics_are_read_as_vllm_keeps_them() -> None:
    registry, labels = CollectorRegistry(), ("model_name", "engine", "finished_reason")
    success = Counter("vllm:request_success", "Done.", labels, registry=registry)
    success.labels("demo", "0", "stop").inc(3)
    success.labels("demo", "0", "abort")
    Gauge("vllm:num_requests_running", "Now.", registry=registry).set(4)
    Counter("http_requests", "Not vLLM's.", registry=registry).inc()
    Counter("vllm:num_preemptions", "The ranks tell.", registry=registry).inc()
    times = Histogram("vllm:e2e", "E2E.", labels[:2], buckets=(1, 2), registry=registry)
    for seconds in (0.5, 1.5, 9.0):
        times.labels("demo", "0").observe(seconds)
    Histogram("vllm:none", "None.", labels[:2], buckets=(1, 2), registry=registry)
    plain = Histogram("vllm:plain", "Plain.", buckets=(1, 2), registry=registry)
    plain.observe(1.0)
    counter, histogram, none, without = engine_families(registry)
    assert (counter.name, counter.labels) == ("vllm:request_success", ("finished_reason",))
    assert [(each.labels, each.value) for each in counter.series] == [
        (("stop",), 3.0),
        (("abort",), 0.0),
    ]
    assert (histogram.labels, histogram.bounds) == ((), (1.0, 2.0))
    assert [(each.value, each.counts) for each in histogram.series] == [(11.0, (1, 1, 1))]
    assert (none.bounds, none.series) == ((1.0, 2.0), ())
    assert [(each.labels, each.value, each.counts) for each in without.series] == [
        ((), 1.0, (1, 0, 0))
    ]


def test_values_are_those_that_prometheus_client_exposes() -> None:
    """What is read where it is stored is what the public way gives, sample by sample."""
    registry, labels = CollectorRegistry(), ("engine", "source")
    counter = Counter("vllm:tokens", "Tokens.", labels, registry=registry)
    histogram = Histogram("vllm:times", "Times.", labels, buckets=(0.1, 1, 5), registry=registry)
    for number in range(20):
        counter.labels("0", f"s{number % 3}").inc(number)
        histogram.labels("0", f"s{number % 4}").observe(number / 3)
    public = {
        (each.name, each.labels["source"], each.labels.get("le")): each.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for each in family.samples
        if not each.name.endswith("_created")
    }
    read: dict[tuple[str, str, str | None], float] = {}
    for family in engine_families(registry):
        for series in family.series:
            (source,) = series.labels
            if not family.bounds:
                read[family.name + "_total", source, None] = series.value
                continue
            read[family.name + "_sum", source, None] = series.value
            read[family.name + "_count", source, None] = sum(series.counts)
            for place, bound in enumerate((*family.bounds, "+Inf")):
                read[family.name + "_bucket", source, str(bound)] = sum(series.counts[: place + 1])
    assert read == public

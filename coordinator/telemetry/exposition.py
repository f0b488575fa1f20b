"""Turns the coordinator's views into Prometheus metric families; defines names and labels.

`aileron_*` are our own, `vllm:*` are those of vLLM 0.32 (with the rank as `engine`, or `cell` for
measurements of gateways over all ranks), `gen_ai_*` are OpenTelemetry's names for the same values.
`metrics.py` calls this module when it renders.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from coordinator.policy.alternator import TIMED
from coordinator.protocol.metrics_wire import (
    DURATION,
    TPOT,
    TTFT,
    VLLM_PREFIX,
    Family,
    Measure,
    Series,
    Tally,
)

View = Mapping[str, Any]

CELL_ENGINE: Final = "cell"
"""The `engine` of vLLM's metrics that are measured over all ranks."""

PROVIDER: Final = "aileron"

NO_ALTERNATION: Final[View] = {
    "cycles": 0,
    "requests": 0,
    "single_seconds": 0.0,
    "seconds": dict.fromkeys(TIMED, 0.0),
}

_GEN_AI: Final = {
    "gen_ai_server_time_to_first_token_seconds": TTFT,
    "gen_ai_server_time_per_output_token_seconds": TPOT,
    "gen_ai_server_request_duration_seconds": DURATION,
}
_GEN_AI_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_response_model")


def layout_metrics(layout: View) -> Iterator[Metric]:
    """Yield the serving layout and each group's load."""
    yield _gauge(
        "aileron_layout_info",
        "The layout that serves; always 1.",
        ("layout",),
        [((layout["layout"] or "none",), 1)],
    )
    yield _plain("aileron_serving", "1 if every rank serves the wanted layout.", layout["serving"])
    yield _plain("aileron_epoch", "The epoch of the wanted layout.", layout["epoch"])
    for name, text, field in (
        ("running", "Tasks that the group runs.", "running"),
        ("waiting", "Tasks that wait inside the group.", "waiting"),
        ("paused", "Tasks that the group holds paused.", "paused"),
        ("pages_free", "Free KV pages of each member.", "pages_free"),
        ("pages", "KV pages of each member.", "pages_total"),
    ):
        rows = [((str(group["leader"]), group["mode"]), group[field]) for group in layout["groups"]]
        yield _gauge(f"aileron_group_{name}", text, ("leader", "mode"), rows)
    yield _gauge(
        "aileron_rank_group_info",
        "The group that a rank belongs to; always 1.",
        ("rank", "mode", "width", "leader"),
        [
            ((str(rank), group["mode"], str(group["width"]), str(group["leader"])), 1)
            for group in layout["groups"]
            for rank in group["ranks"]
        ],
    )


def use_metrics(decisions: View) -> Iterator[Metric]:
    """Yield how much of the best layout is used, by the newest decision with candidates."""
    uses = (
        [each["use"] for each in decision["candidates"] if "use" in each]
        for decision in reversed(decisions["decisions"])
    )
    newest = next((found for found in uses if found), [])
    rows = [((), min(newest))] if newest else []
    yield _gauge(
        "aileron_best_layout_use_ratio",
        "Share of the best layout's capacity that current requests need, as the adaptive policy "
        "predicts; while it is low, a switch costs less than a cell.",
        (),
        rows,
    )


def alternation_metrics(alternation: View | None) -> Iterator[Metric]:
    """Yield what the alternation of batch work has done; 0 without an adaptive policy."""
    found = NO_ALTERNATION if alternation is None else alternation
    done = "Batch requests that ended meanwhile."
    single = "Time that these take in the best single layout, as the policy predicts."
    cycles = "Times that prompts of batch requests were read in a layout for that."
    name = "aileron_alternation"
    yield CounterMetricFamily(f"{name}_cycles", cycles, value=found["cycles"])
    yield CounterMetricFamily(f"{name}_requests", done, value=found["requests"])
    seconds = found["single_seconds"]
    yield CounterMetricFamily(f"{name}_single_layout_seconds", single, value=seconds)
    text = "Time of an alternation, by phase, and of the switches between them."
    family = CounterMetricFamily(f"{name}_seconds", text, labels=("phase",))
    for phase, seconds in found["seconds"].items():
        family.add_metric((phase,), seconds)
    yield family


def probe_metrics(probes: Iterable[View], out: Iterable[View]) -> Iterator[Metric]:
    """Yield the newest probe of each mode of each group, and the quarantined modes."""
    rows = [((each["mode"], _span(each)), each) for each in probes]
    states = {labels: 0 for labels, _ in rows} | {(each["mode"], _span(each)): 1 for each in out}
    yield _gauge(
        "aileron_mode_out_of_service",
        "1 if a mode of these ranks was taken out of service because its probe drifted.",
        ("mode", "ranks"),
        list(states.items()),
    )
    for name, text, field in (
        ("error", "Error of the newest probe, in nats per token.", "error_nats"),
        ("error_max", "Probe error from which a mode is taken out of service.", "error_max_nats"),
    ):
        values = [(labels, each[field]) for labels, each in rows]
        yield _gauge(f"aileron_probe_{name}_nats", text, ("mode", "ranks"), values)
    yield _gauge(
        "aileron_probe_seconds",
        "How long the newest probe took.",
        ("mode", "ranks"),
        [(labels, each["took_ms"] / 1_000) for labels, each in rows],
    )


def _span(view: View) -> str:
    ranks = view["ranks"]
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def rank_metrics(ranks: Iterable[View]) -> Iterator[Metric]:
    """Yield the state of each rank: availability, heartbeat, lease, restarts, pages, steps."""
    ranks = list(ranks)
    heard = [each for each in ranks if "heartbeat_age_ms" in each]
    yield _plain(
        "aileron_ranks_alive", "Ranks that can serve.", sum(bool(r["available"]) for r in ranks)
    )
    yield _gauge(
        "aileron_rank_state",
        "State of a rank in the switch to its epoch; 1 for the state that it is in.",
        ("rank", "state"),
        [((str(r["rank"]), _state(r)), 1) for r in ranks],
    )
    for name, text, field in (
        ("heartbeat_age", "Time since a rank's last heartbeat.", "heartbeat_age_ms"),
        (
            "lease_left",
            "Time for which a rank may still step without another heartbeat.",
            "lease_left_ms",
        ),
    ):
        rows = [((str(r["rank"]),), r[field] / 1_000) for r in heard]
        yield _gauge(f"aileron_{name}_seconds", text, ("rank",), rows)
    restarts = CounterMetricFamily(
        "aileron_rank_restarts",
        "Processes that replaced an earlier process of the rank.",
        labels=("rank",),
    )
    for rank in heard:
        restarts.add_metric((str(rank["rank"]),), rank["restarts"])
    yield restarts
    reported = [each for each in heard if "pages" in each]
    yield _gauge(
        "aileron_pages",
        "KV pages of a rank by owner: free, its own group's, leased to wide groups.",
        ("rank", "owner"),
        [
            ((str(r["rank"]), owner), r["pages"][owner])
            for r in reported
            for owner in ("free", "owned", "leased")
        ],
    )
    yield _gauge(
        "aileron_rank_links_cut",
        "Links to gateways over which a rank cannot push tokens; other ranks do.",
        ("rank",),
        [((str(r["rank"]),), len(r["cut_off"])) for r in reported],
    )
    yield from _process_metrics([each for each in reported if each["gauges"]])
    yield from _loan_metrics(heard)
    yield from _host_metrics([each for each in reported if each["gauges"]])


def _state(rank: View) -> str:
    if not rank["available"]:
        return "away"
    return str(rank["phase"]) if "pages" in rank else "starting"


def _process_metrics(ranks: list[View]) -> Iterator[Metric]:
    yield _gauge(
        "aileron_rank_resident_memory_bytes",
        "Resident host memory of a rank's process.",
        ("rank",),
        [((str(r["rank"]),), r["gauges"].get("rss_bytes", 0)) for r in ranks],
    )
    steps = CounterMetricFamily(
        "aileron_rank_steps", "Forward steps of a rank.", labels=("rank", "mode")
    )
    for rank in ranks:
        in_sp = rank["gauges"].get("steps_sp", 0)
        steps.add_metric((str(rank["rank"]), "sp"), in_sp)
        steps.add_metric((str(rank["rank"]), "dp_or_tp"), rank["gauges"].get("steps", 0) - in_sp)
    yield steps


def _loan_metrics(ranks: list[View]) -> Iterator[Metric]:
    """Yield what ranks borrow; ranks that hold all weights borrow nothing."""
    for name, text, field, unit in (
        ("borrowed_bytes", "Bytes of weights that a rank read from others.", "borrowed_bytes", 1),
        (
            "loan_wait_seconds",
            "How long a rank's computation waited for weights that it borrows.",
            "loan_wait_us",
            1e6,
        ),
    ):
        counter = CounterMetricFamily(f"aileron_{name}", text, labels=("rank",))
        for rank in ranks:
            counter.add_metric((str(rank["rank"]),), rank.get("gauges", {}).get(field, 0) / unit)
        yield counter
    yield _gauge(
        "aileron_step_floor_seconds",
        "Least time of a step in the mode that borrows most; 0 if the rank borrows nothing.",
        ("rank",),
        [
            ((str(r["rank"]),), max(r["weights"]["floor_ms"].values(), default=0) / 1_000)
            for r in ranks
        ],
    )
    yield _gauge(
        "aileron_whole_layers",
        "Layers whose feed-forward part a rank with a part of the weights holds whole.",
        ("rank",),
        [((str(r["rank"]),), r["weights"]["whole_layers"]) for r in ranks],
    )


def _host_metrics(ranks: list[View]) -> Iterator[Metric]:
    """Yield the host pages of each rank; all 0 in a cell without any."""

    def rows(field: str) -> list[tuple[tuple[str, ...], float]]:
        return [((str(rank["rank"]),), rank["gauges"].get(field, 0)) for rank in ranks]

    yield _gauge(
        "aileron_host_pages",
        "Host pages that a rank owns now, into which it stores; every rank reads those of all.",
        ("rank",),
        rows("host_pages"),
    )
    yield _gauge(
        "aileron_host_pages_used",
        "Host pages with a block, of those that a rank owns.",
        ("rank",),
        rows("host_pages_used"),
    )
    for name, text, field in (
        (
            "computed_tokens",
            "Tokens that the groups led by a rank have computed.",
            "computed_tokens",
        ),
        (
            "host_hits",
            "Tokens that the groups led by a rank read from host pages instead of computing them.",
            "host_hits",
        ),
        ("host_loaded_bytes", "Bytes that a rank read from host pages.", "host_loaded_bytes"),
        (
            "lost_hits",
            "Tokens that the groups led by a rank read from the memory of lost groups instead of "
            "computing them.",
            "lost_hits",
        ),
        (
            "lost_loaded_bytes",
            "Bytes that a rank read from the memory of lost groups.",
            "lost_loaded_bytes",
        ),
        ("host_stored_bytes", "Bytes that a rank wrote to host pages.", "host_stored_bytes"),
        (
            "host_full_blocks",
            "Blocks that found no host page, as running tasks used all.",
            "host_full_blocks",
        ),
        (
            "host_late_blocks",
            "Blocks that were not stored in host pages, as too many were to be stored before them.",
            "host_late_blocks",
        ),
    ):
        counter = CounterMetricFamily(f"aileron_{name}", text, labels=("rank",))
        for labels, value in rows(field):
            counter.add_metric(labels, value)
        yield counter


def queue_metrics(queue: View, now_ms: int) -> Iterator[Metric]:
    """Yield the queue and the unfinished tasks, by tier and by state."""
    tiers = queue["tiers"].items()
    for name, text, field in (
        ("queue_depth", "Tasks that wait for a group.", "queued"),
        ("queue_tokens", "Most tokens that the waiting tasks may reach.", "tokens"),
        ("tier_placed", "Tasks that a group holds.", "placed"),
    ):
        yield _gauge(f"aileron_{name}", text, ("tier",), [((t,), each[field]) for t, each in tiers])
    yield _gauge(
        "aileron_queue_oldest_seconds",
        "How long the oldest waiting task has waited.",
        ("tier",),
        [((t,), oldest_s(each, now_ms)) for t, each in tiers],
    )
    rows = [((state,), count) for state, count in queue["tasks"].items()]
    yield _gauge("aileron_tasks", "Unfinished tasks.", ("state",), rows)


def oldest_s(tier: View, now_ms: int) -> float:
    """Return how long a tier's oldest task has waited, in seconds; 0 if none waits."""
    oldest_ms = tier["oldest_ms"]
    return 0.0 if oldest_ms is None else max(0, now_ms - oldest_ms) / 1_000


def engine_metrics(layout: View, ranks: Iterable[View], model: str) -> Iterator[Metric]:
    """Yield vLLM's metrics of the engine; `engine` is the rank that leads the scheduler."""
    names = ("model_name", "engine")
    groups = [((model, str(group["leader"])), group) for group in layout["groups"]]
    for name, text, field in (
        ("running", "Number of requests in model execution batches.", "running"),
        ("waiting", "Number of requests waiting to be processed.", "waiting"),
    ):
        rows = [(labels, group[field]) for labels, group in groups]
        yield _gauge(f"vllm:num_requests_{name}", text, names, rows)
    yield _gauge(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        names,
        [(labels, _usage(group)) for labels, group in groups],
    )
    info = ("block_size", "num_gpu_blocks")
    yield _gauge(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig",
        (*names, *info),
        [((*at, str(of["block_tokens"]), str(of["blocks_total"])), 1) for at, of in groups],
    )
    counted = [each for each in ranks if "prefix_queries" in each.get("gauges", {})]
    for name, text, field in (
        (
            "prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
            "prefix_queries",
        ),
        (
            "prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            "prefix_hits",
        ),
        (
            "num_preemptions",
            "Cumulative number of preemption from the engine.",
            "preemptions",
        ),
    ):
        family = CounterMetricFamily(VLLM_PREFIX + name, text, labels=names)
        for rank in counted:
            family.add_metric((model, str(rank["rank"])), rank["gauges"][field])
        yield family


def _usage(group: View) -> float:
    total = group["pages_total"]
    return 1 - group["pages_free"] / total if total else 0.0


def tally_metrics(families: Iterable[Family], model: str) -> Iterator[Metric]:
    """Yield counters and histograms; vLLM's get back the labels that vLLM gives them."""
    for family in families:
        if family.name.startswith(VLLM_PREFIX):
            names = ("model_name", "engine", *family.labels)
            yield _family_metric(family, names, (model, CELL_ENGINE))
        else:
            yield _family_metric(family, family.labels)


def gen_ai_metrics(tally: Tally, model: str) -> Iterator[Metric]:
    """Yield TTFT, time per output token and request duration under OpenTelemetry's names."""
    for name, measure in _GEN_AI.items():
        series = _by(tally, measure, "operation")
        values = tuple(Series((each.labels[0], PROVIDER, model), *_rest(each)) for each in series)
        yield _family_metric(
            Family(name, measure.text, _GEN_AI_LABELS, measure.bounds, values), _GEN_AI_LABELS
        )


def prediction_metrics(
    last: Mapping[tuple[str, str], tuple[float, float]],
) -> Iterator[Metric]:
    """Yield the last predicted and observed values, by measure and tier."""
    names = ("measure", "tier")
    for place, (name, text) in enumerate(
        (
            (
                "predicted",
                "Mean time in the last compared prediction of the adaptive policy.",
            ),
            (
                "observed",
                "Mean time that was observed over the span of the last compared prediction.",
            ),
        )
    ):
        rows = [(labels, pair[place]) for labels, pair in last.items()]
        yield _gauge(f"aileron_policy_{name}_seconds", text, names, rows)


def tenant_metrics(
    totals: Mapping[tuple[str, ...], Mapping[str, float]],
) -> Iterator[Metric]:
    """Yield the tokens of tenants; `totals` are those of a `UsageHistory`."""
    counter = CounterMetricFamily(
        "aileron_tenant_tokens",
        "Tokens of ended requests by tenant and kind; cached tokens are prompt tokens as well.",
        labels=("tenant", "tier", "kind"),
    )
    for labels, counts in totals.items():
        for kind in ("prompt", "cached", "output"):
            counter.add_metric((*labels, kind), counts[f"{kind}_tokens"])
    yield counter


def tier_family(tally: Tally, measure: Measure) -> Family:
    """Return a measure by tier alone."""
    series = tuple(_by(tally, measure, "tier"))
    return Family(measure.name, measure.text, ("tier",), measure.bounds, series)


def _by(tally: Tally, measure: Measure, label: str) -> list[Series]:
    """Sum a measure over all labels but one."""
    at = measure.labels.index(label)
    summed = Tally()
    one = Measure(measure.name, measure.text, (label,), measure.bounds)
    for labels, growing in tally.series_of(measure).items():
        summed.add(one, (labels[at],), growing.value, growing.counts)
    return [
        Series(labels, growing.value, tuple(growing.counts))
        for labels, growing in summed.series_of(one).items()
    ]


def _rest(series: Series) -> tuple[float, tuple[int, ...]]:
    return series.value, series.counts


def _family_metric(
    family: Family, labels: tuple[str, ...], before: tuple[str, ...] = ()
) -> CounterMetricFamily | HistogramMetricFamily:
    if not family.bounds:
        counter = CounterMetricFamily(family.name, family.text, labels=labels)
        for each in family.series:
            counter.add_metric((*before, *each.labels), each.value)
        return counter
    histogram = HistogramMetricFamily(family.name, family.text, labels=labels)
    bounds = [*(repr(float(bound)) for bound in family.bounds), "+Inf"]
    for each in family.series:
        buckets = list(zip(bounds, map(float, accumulate(each.counts)), strict=True))
        histogram.add_metric((*before, *each.labels), buckets, each.value)
    return histogram


def _gauge(
    name: str,
    text: str,
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], float]],
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _plain(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)

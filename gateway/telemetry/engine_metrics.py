"""vLLM's own metrics of its front end in this process, from prometheus_client's registry.

Only counters and histograms: one gateway's gauges say nothing about a cell, and ranks report their
own. The coordinator adds the model and engine labels again.

Values are read where prometheus_client stores them: its public `collect` takes 3 ms of the event
loop, most of it for text and for metrics of the process, and this takes 0.2 ms. The contract test
is `tests/unit/gateway/test_meter.py`.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from coordinator.protocol.metrics_wire import VLLM_PREFIX, Family, Series

ADDED_LABELS = frozenset({"model_name", "engine"})
EXCLUDED_METRICS = frozenset(
    {
        # Only counted if vLLM runs the model in the same process.
        *("vllm:estimated_flops_per_gpu", "vllm:estimated_read_bytes_per_gpu"),
        "vllm:estimated_write_bytes_per_gpu",
        # Reported by the ranks.
        *("vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
        *("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"),
    }
)

Metric = Counter | Histogram


def engine_families(registry: CollectorRegistry = REGISTRY) -> Iterator[Family]:
    """Yield vLLM's counters and histograms with their current values."""
    for metric in tuple(registry._collector_to_names):
        if isinstance(metric, Metric):
            name = metric._name
            if name.startswith(VLLM_PREFIX) and name not in EXCLUDED_METRICS:
                yield _family(metric)


def _family(metric: Metric) -> Family:
    places = [at for at, name in enumerate(metric._labelnames) if name not in ADDED_LABELS]
    labels = tuple(metric._labelnames[at] for at in places)
    bounds = tuple(metric._upper_bounds[:-1]) if isinstance(metric, Histogram) else ()
    children: list[tuple[Sequence[str], Metric]] = [((), metric)]
    if metric._labelnames:
        with metric._lock:
            children = [(values, cast(Metric, one)) for values, one in metric._metrics.items()]
    series = tuple(_series(tuple(values[at] for at in places), one) for values, one in children)
    return Family(metric._name, metric._documentation, labels, bounds, series)


def _series(labels: tuple[str, ...], metric: Metric) -> Series:
    if isinstance(metric, Counter):
        return Series(labels, metric._value.get())
    counts = tuple(int(bucket.get()) for bucket in metric._buckets)
    return Series(labels, metric._sum.get(), counts)

"""vLLM's own metrics of its front end in this process, from prometheus_client's registry.

Only counters and histograms: one gateway's gauges say nothing about a cell, and ranks report their
own. The coordinator adds the model and engine labels again.
"""

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

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


def engine_families(registry: CollectorRegistry = REGISTRY) -> Iterator[Family]:
    """Yield vLLM's counters and histograms with their current values."""
    for metric in registry.collect():
        if metric.name.startswith(VLLM_PREFIX) and metric.name not in EXCLUDED_METRICS:
            if metric.type == "counter":
                yield _counter(metric)
            elif metric.type == "histogram":
                yield _histogram(metric)


def _counter(metric: Metric) -> Family:
    samples = [each for each in metric.samples if each.name == metric.name + "_total"]
    names = _label_names(samples)
    series = tuple(Series(_values(each, names), each.value) for each in samples)
    return Family(metric.name, metric.documentation, names, (), series)


def _histogram(metric: Metric) -> Family:
    buckets = [each for each in metric.samples if each.name == metric.name + "_bucket"]
    names = tuple(name for name in _label_names(buckets) if name != "le")
    sums = {
        _values(each, names): each.value
        for each in metric.samples
        if each.name == metric.name + "_sum"
    }
    cumulative: dict[tuple[str, ...], list[tuple[float, int]]] = {}
    for each in buckets:
        point = (float(each.labels["le"]), int(each.value))
        cumulative.setdefault(_values(each, names), []).append(point)
    first = next(iter(cumulative.values()), [])
    bounds = tuple(bound for bound, _ in sorted(first)[:-1])
    series = tuple(
        Series(labels, sums.get(labels, 0.0), _differences(sorted(points)))
        for labels, points in cumulative.items()
    )
    return Family(metric.name, metric.documentation, names, bounds, series)


def _differences(points: list[tuple[float, int]]) -> tuple[int, ...]:
    counts = [count for _, count in points]
    return tuple(new - old for new, old in zip(counts, [0, *counts], strict=False))


def _label_names(samples: list[Sample]) -> tuple[str, ...]:
    names = samples[0].labels if samples else {}
    return tuple(name for name in names if name not in ADDED_LABELS)


def _values(sample: Sample, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sample.labels[name] for name in names)

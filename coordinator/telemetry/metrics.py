"""Prometheus metrics of a cell: the core's views, its observers, and the gateways' totals.

Rendered at most once per `CACHED_MS`, however many scrapers ask. No label holds a value that
clients choose, but for the metric of tenants, which only the configuration turns on. The admin API
calls this module.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.protocol.metrics_wire import DURATION, TPOT, TTFT
from coordinator.protocol.policy_config import TIERS, SloConfig
from coordinator.telemetry import exposition
from coordinator.telemetry.core_metrics import CoreMetrics
from coordinator.telemetry.metrics_aggregator import MetricsAggregator
from coordinator.telemetry.prediction_tracker import PredictionTracker

CACHED_MS = 250
DECISIONS_MAX = 16

View = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Views:
    """The inputs of metrics; each is called once per render."""

    layout: Callable[[], View]
    ranks: Callable[[], View]
    queue: Callable[[], View]
    decisions: Callable[[int], View]
    clock: Callable[[], int]
    """Milliseconds of the core's clock."""
    alternation: Callable[[], View | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that do not change while the process lives."""

    model: str = "unknown"
    version: str = "unknown"
    slo: SloConfig = field(default_factory=SloConfig)
    has_tenants: bool = False
    """Whether the metric of tenants is exported."""


class Metrics:
    """The registry of one coordinator.

    `aggregator` holds its gateways' totals, the others hold observations of its core.
    """

    def __init__(
        self,
        views: Views,
        aggregator: MetricsAggregator,
        watcher: CoreMetrics,
        prediction_tracker: PredictionTracker,
        facts: Facts | None = None,
    ) -> None:
        self._views = views
        self.aggregator = aggregator
        self.watcher = watcher
        self.prediction_tracker = prediction_tracker
        self._registry = CollectorRegistry()
        self._collector = _CellCollector(self, views, facts or Facts())
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self._rendered: tuple[int, bytes] | None = None

    def show_goals(self, slo: SloConfig) -> None:
        """Export other objectives from now on."""
        self._collector.facts = replace(self._collector.facts, slo=slo)

    def render(self) -> bytes:
        """Return the exposition text, which is at most `CACHED_MS` old."""
        now_ms = self._views.clock()
        if self._rendered is None or now_ms - self._rendered[0] >= CACHED_MS:
            self.watcher.settle(now_ms)
            self._rendered = now_ms, generate_latest(self._registry)
        return self._rendered[1]


class _CellCollector(Collector):
    def __init__(self, metrics: Metrics, views: Views, facts: Facts) -> None:
        self._metrics = metrics
        self._views = views
        self.facts = facts
        self._has_served = False

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names are unique by construction, and collecting needs a running core."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read the views once and yield all metrics."""
        layout, of_ranks = self._views.layout(), self._views.ranks()
        ranks = of_ranks["ranks"]
        yield from self._facts_metrics()
        yield from exposition.layout_metrics(layout)
        self._has_served |= layout["serving"]
        yield GaugeMetricFamily(
            "aileron_has_served",
            "1 once the cell has served since its coordinator's start; 0 while it loads.",
            value=self._has_served,
        )
        yield from exposition.rank_metrics(ranks)
        yield from exposition.use_metrics(self._views.decisions(DECISIONS_MAX))
        yield from exposition.alternation_metrics(self._views.alternation())
        yield from exposition.probe_metrics(of_ranks["probes"], layout["out_of_service"])
        yield from exposition.queue_metrics(self._views.queue(), self._views.clock())
        model = self.facts.model
        yield from exposition.engine_metrics(layout, ranks, model)
        watcher, tally = self._metrics.watcher, self._metrics.aggregator.tally
        yield from exposition.tally_metrics(watcher.tally.families(), model)
        prediction_tracker = self._metrics.prediction_tracker
        yield from exposition.tally_metrics(prediction_tracker.tally.families(), model)
        yield from exposition.prediction_metrics(prediction_tracker.last)
        yield GaugeMetricFamily(
            "aileron_reshard_bytes_per_second",
            "Speed at which the last switch with a migration pulled KV, over all ranks.",
            value=watcher.reshard_bytes_per_s,
        )
        by_tier = {each.name: each for each in (TTFT, TPOT, DURATION)}
        families = [
            exposition.tier_family(tally, by_tier[each.name]) if each.name in by_tier else each
            for each in tally.families()
        ]
        yield from exposition.tally_metrics(families, model)
        yield from exposition.gen_ai_metrics(tally, model)
        if self.facts.has_tenants:
            yield from exposition.tenant_metrics(self._metrics.aggregator.usage.totals)

    def _facts_metrics(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "aileron_build_info", "This build; always 1.", labels=("version", "model")
        )
        info.add_metric((self.facts.version, self.facts.model), 1)
        yield info
        targets = GaugeMetricFamily(
            "aileron_slo_target_seconds", "The objectives of each tier.", labels=("tier", "measure")
        )
        for tier in TIERS:
            target = getattr(self.facts.slo, tier)
            for measure, value_ms in (("ttft", target.ttft_ms), ("tpot", target.tpot_ms)):
                if value_ms is not None:
                    targets.add_metric((tier, measure), value_ms / 1_000)
        yield targets

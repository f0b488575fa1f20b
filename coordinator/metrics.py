"""Prometheus metrics of the coordinator, read from the core's views when they are scraped.

Labels hold nothing that clients choose. Called by the admin API.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.records import SwitchRecord

View = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Views:
    """What metrics are made of; each is asked once per scrape."""

    layout: Callable[[], View]
    ranks: Callable[[], View]
    queue: Callable[[], View]


class Metrics:
    """The registry of one coordinator."""

    def __init__(self, views: Views) -> None:
        self._switches: Counter[tuple[str, str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(_CellCollector(views, self._switches))

    def switch_ended(self, record: SwitchRecord) -> None:
        """Count a switch."""
        outcome = record.outcome.value.replace(" ", "_")
        self._switches[record.from_layout, record.to_layout, outcome] += 1

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self._registry)


class _CellCollector(Collector):
    def __init__(self, views: Views, switches: Counter[tuple[str, str, str]]) -> None:
        self._views = views
        self._switches = switches

    def describe(self) -> Iterator[Metric]:
        """Return nothing: names are unique by construction, and asking needs a running core."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read the views once."""
        layout = self._views.layout()
        yield from _layout_metrics(layout)
        yield from _rank_metrics(self._views.ranks()["ranks"])
        yield from _queue_metrics(self._views.queue())
        switches = CounterMetricFamily(
            "aileron_switch", "Switches that ended.", labels=("from", "to", "outcome")
        )
        for labels, count in self._switches.items():
            switches.add_metric(labels, count)
        yield switches


def _layout_metrics(layout: View) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "aileron_layout_info", "The layout that serves; always 1.", labels=("layout", "epoch")
    )
    info.add_metric((layout["layout"], str(layout["epoch"])), 1)
    yield info
    yield GaugeMetricFamily(
        "aileron_serving", "1 if every rank serves the wanted layout.", value=layout["serving"]
    )
    for name, text in (
        ("running", "Tasks that the group runs."),
        ("waiting", "Tasks that wait inside the group."),
        ("paused", "Tasks that the group holds paused."),
        ("pages_free", "Free KV pages of each member."),
        ("pages_total", "KV pages of each member."),
    ):
        family = GaugeMetricFamily(f"aileron_group_{name}", text, labels=("leader", "mode"))
        for group in layout["groups"]:
            family.add_metric((str(group["leader"]), group["mode"]), group[name])
        yield family


def _rank_metrics(ranks: list[View]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "aileron_ranks_alive",
        "Ranks that can serve.",
        value=sum(bool(rank["available"]) for rank in ranks),
    )
    ages = GaugeMetricFamily(
        "aileron_heartbeat_age_seconds", "Time since a rank was heard.", labels=("rank",)
    )
    restarts = CounterMetricFamily(
        "aileron_rank_restarts", "Processes that took a rank's place.", labels=("rank",)
    )
    for rank in ranks:
        if "heartbeat_age_ms" in rank:
            ages.add_metric((str(rank["rank"]),), rank["heartbeat_age_ms"] / 1000)
            restarts.add_metric((str(rank["rank"]),), rank["restarts"])
    yield ages
    yield restarts


def _queue_metrics(queue: View) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "aileron_queue_depth", "Tasks that wait for a group.", labels=("tier",)
    )
    tokens = GaugeMetricFamily(
        "aileron_queue_tokens", "Most tokens that waiting tasks may come to.", labels=("tier",)
    )
    for tier, waiting in queue["tiers"].items():
        depth.add_metric((tier,), waiting["queued"])
        tokens.add_metric((tier,), waiting["tokens"])
    yield depth
    yield tokens
    tasks = GaugeMetricFamily("aileron_tasks", "Unfinished tasks.", labels=("state",))
    for state, count in queue["tasks"].items():
        tasks.add_metric((state,), count)
    yield tasks

"""The observers of a core: they see its events and effects, and change nothing."""

from dataclasses import dataclass
from typing import Any

from coordinator.core.core import Core
from coordinator.protocol.config import Config
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.server import CellServer
from coordinator.telemetry.core_metrics import CoreMetrics
from coordinator.telemetry.prediction_tracker import PredictionTracker

MEASURED_SWITCHES = 100
"""Switches among which those are looked for that are to be measured."""


@dataclass(frozen=True, slots=True)
class Observers:
    """What observes all events and effects of the core, from its first event on."""

    core: CoreMetrics
    prediction_tracker: PredictionTracker


def observe(core: Core, owner: CoreActor, server: CellServer, config: Config) -> Observers:
    """Let the metrics' watchers see what the owner hands to the core."""

    def switches() -> Any:
        return core.switches_view(MEASURED_SWITCHES)["switches"]

    watcher, prediction_tracker = CoreMetrics(switches), PredictionTracker(server.aggregator.tally)
    owner.on_switch = lambda record: watcher.switch_ended(record, monotonic_ms())
    owner.watchers = (watcher,)
    if config.policy.name == "adaptive":
        owner.watchers += (prediction_tracker,)
    return Observers(watcher, prediction_tracker)

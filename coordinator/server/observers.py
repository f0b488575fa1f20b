"""The observers of a core: they see its events and effects, and change nothing."""

from dataclasses import dataclass
from typing import Any

from coordinator.core.core import Core
from coordinator.protocol.config import Config
from coordinator.server.cell_log import CellLog
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.server import CellServer
from coordinator.telemetry.core_metrics import CoreMetrics
from coordinator.telemetry.prediction_tracker import PredictionTracker

SWITCHES_MAX = 100
"""Newest switches in which the metrics look up those to measure."""


@dataclass(frozen=True, slots=True)
class Observers:
    """The observers of all events and effects, from the first event on."""

    core: CoreMetrics
    prediction_tracker: PredictionTracker


def observe(core: Core, owner: CoreActor, server: CellServer, config: Config) -> Observers:
    """Attach the metrics' watchers to the actor."""

    def switches() -> Any:
        return core.views.switches(SWITCHES_MAX)["switches"]

    watcher, prediction_tracker = CoreMetrics(switches), PredictionTracker(server.aggregator.tally)
    owner.on_switch = lambda record: watcher.switch_ended(record, monotonic_ms())
    owner.watchers = (watcher, CellLog(core.views, range(config.cell.ranks)))
    if config.policy.name == "adaptive":
        owner.watchers += (prediction_tracker,)
    return Observers(watcher, prediction_tracker)

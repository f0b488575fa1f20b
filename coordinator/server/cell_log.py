"""Logs what happens to a cell: switches from beginning to end, and ranks that come and go.

It observes the core's events and effects, as the metrics do, and changes nothing. A switch's phases
are logged `SETTLE_MS` after its end, when the measurements of ranks and gateways have arrived.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import structlog

from comm_pool.layout import Rank
from coordinator.model.events import Effect, Event, SwitchRecorded, Tick
from coordinator.model.records import Outcome, SwitchRecord
from coordinator.telemetry.core_metrics import PHASES, SETTLE_MS

log = structlog.get_logger()

SWITCHES_MAX = 16
"""Newest switches among which those that began in one event, or were measured, are looked up."""

NO_LAYOUT = "none"
"""Stands for the layout before the first one."""


class Views(Protocol):
    """The part of a core's read model that the log needs."""

    @property
    def epoch(self) -> int:
        """The epoch of the target."""

    def is_available(self, rank: Rank) -> bool:
        """Return whether the rank is in the target."""

    def switches(self, last: int) -> Mapping[str, Any]:
        """Return the newest switches as the admin API shows them."""


class CellLog:
    """Watches one core."""

    def __init__(self, views: Views, ranks: Iterable[int]) -> None:
        self._views = views
        self._ranks = tuple(map(Rank, ranks))
        self._epoch = views.epoch
        self._available = self._available_now()
        self._unmeasured: dict[int, int] = {}

    def saw_event(self, event: Event, now_ms: int) -> None:
        """Log switches that have begun, and ranks that have come or gone."""
        if self._views.epoch != self._epoch:
            self._log_begun()
            self._compare_ranks()
        elif isinstance(event, Tick):
            self._compare_ranks()
            self._log_phases(now_ms)

    def saw_effect(self, effect: Effect, now_ms: int) -> None:
        """Log the end of a switch."""
        if not isinstance(effect, SwitchRecorded):
            return
        record = effect.record
        if record.outcome is Outcome.SERVED:
            log.info("switch_served", **_about(record), total_ms=record.total_ms)
            self._unmeasured[record.epoch] = now_ms + SETTLE_MS
        else:
            log.info("switch_superseded", **_about(record), total_ms=record.total_ms)

    def _log_begun(self) -> None:
        for switch in self._views.switches(SWITCHES_MAX)["switches"]:
            if switch["epoch"] > self._epoch:
                log.info(
                    "switch_begun",
                    epoch=switch["epoch"],
                    from_layout=switch["from"] or NO_LAYOUT,
                    to_layout=switch["to"],
                    cause=switch["cause"],
                    carry=str(switch["carry"]),
                    decide_ms=switch["decide_ms"],
                )
        self._epoch = self._views.epoch

    def _log_phases(self, now_ms: int) -> None:
        due = {epoch for epoch, at_ms in self._unmeasured.items() if at_ms <= now_ms}
        if not due:
            return
        for epoch in due:
            del self._unmeasured[epoch]
        for switch in self._views.switches(SWITCHES_MAX)["switches"]:
            if switch["epoch"] in due:
                phases = {name: switch[name] for name in PHASES.values() if switch[name]}
                tasks = {str(carry): count for carry, count in switch["tasks"].items() if count}
                log.info(
                    "switch_measured",
                    epoch=switch["epoch"],
                    **phases,
                    gap_ms_max=round(switch["gap_ms_max"], 3),
                    precopy_rounds=switch["precopy_rounds"],
                    precopy_bytes=switch["precopy_bytes"],
                    reshard_bytes=switch["reshard_bytes"],
                    tasks=tasks,
                )

    def _compare_ranks(self) -> None:
        available = self._available_now()
        if available == self._available:
            return
        for rank in sorted(available - self._available):
            log.info("rank_joined", rank=rank)
        for rank in sorted(self._available - available):
            log.warning("rank_left", rank=rank)
        self._available = available

    def _available_now(self) -> frozenset[Rank]:
        return frozenset(rank for rank in self._ranks if self._views.is_available(rank))


def _about(record: SwitchRecord) -> dict[str, Any]:
    return {
        "epoch": record.epoch,
        "from_layout": record.from_layout or NO_LAYOUT,
        "to_layout": record.to_layout,
        "cause": record.cause,
        "carry": str(record.carry),
    }

"""Publishes a gateway's metrics to the cells.

Each cell gets the measures of its own streams. Measures of the gateway itself, of HTTP and of
vLLM's front end go to one cell, its home, so that they are added up once. Called by the process on
its ticks; pure.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from coordinator.protocol.metrics_wire import OWN, USAGE, Family, Measure, Measures, Series, Tally
from gateway.fleet.roster import CellRoster
from gateway.telemetry.meter import RequestMeter

PUBLISH_TICKS = 2
"""Ticks between two messages with the gateway's own measures and vLLM's metrics.

With the time for which the coordinator serves a rendered text, a value is at most 1 s old.
"""
USAGE_TICKS = 8
"""Ticks between two messages with the usage of tenants, which may have thousands of series."""
COORDINATORS_REMEMBERED = 1_024
"""Coordinators whose shares stay in memory; the least recently used are dropped first."""


class Session(Protocol):
    """A session with a cell."""

    coordinator: str
    """The coordinator that answers in it."""

    def send(self, message: Measures) -> None:
        """Send soon."""


class Fleet(Protocol):
    """The cells that a gateway has sessions with."""

    @property
    def cells(self) -> CellRoster:
        """The known cells."""

    @property
    def home(self) -> Session | None:
        """The session with the cell that gets the measures of no cell."""

    def session(self, cell: str) -> Session | None:
        """Return the session with a cell while it is up, else None."""


class CellTallies(Protocol):
    """Measures of streams, by the cell that computed them."""

    def by_cell(self) -> list[tuple[str, Tally]]:
        """Return each cell that had streams, with its tally."""

    def forget(self, cell: str) -> None:
        """Drop the tally of a cell that is gone for good."""


class DeltaTracker:
    """Turns totals into messages, so that each increase is in one coordinator's share only.

    A coordinator's share is the growth while it was the receiver. Shares only grow, so messages may
    be lost or repeated, and a coordinator that becomes the receiver again continues its own share.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[tuple[str, tuple[str, ...]], Series]] = {}
        self._shares: OrderedDict[str, Tally] = OrderedDict()

    def give(self, coordinator: str, families: Iterable[Family], source: str = "") -> None:
        """Add the growth since the last call with this source to a coordinator's share.

        Totals of two sources may have the same names: they are added up.
        """
        share = self._shares.setdefault(coordinator, Tally())
        self._shares.move_to_end(coordinator)
        while len(self._shares) > COORDINATORS_REMEMBERED:
            self._shares.popitem(last=False)
        known = self._known.setdefault(source, {})
        for each in families:
            own = Measure(each.name, each.text, each.labels, each.bounds)
            measure = OWN.get(each.name) or USAGE.get(each.name, own)
            for new in each.series:
                nothing = Series(new.labels, 0.0, (0,) * len(new.counts))
                old = known.get((each.name, new.labels), nothing)
                known[each.name, new.labels] = new
                grown = zip(new.counts, old.counts, strict=True)
                share.add(measure, new.labels, new.value - old.value, (a - b for a, b in grown))

    def message(self, coordinator: str) -> Measures:
        """Return the message for a coordinator: its whole share."""
        return Measures(self._shares[coordinator].families())

    def forget(self, source: str) -> None:
        """Drop the totals of a source that ends."""
        self._known.pop(source, None)


class MetricsPublisher:
    """Publishes a gateway's measures to the cells of a fleet."""

    def __init__(
        self, fleet: Fleet, meter: RequestMeter, engine: Callable[[], Iterable[Family]]
    ) -> None:
        """`engine` reads vLLM's own metrics."""
        self._fleet = fleet
        self._meter = meter
        self._engine = engine
        self._tracker, self._usage_tracker = DeltaTracker(), DeltaTracker()
        self._ticks = 0

    def tick(self) -> None:
        """Count a tick, and publish what is due."""
        self._ticks += 1
        if self._ticks % PUBLISH_TICKS == 0:
            self._publish_metrics()
        if self._ticks % USAGE_TICKS == 0:
            self._publish_usage()

    def publish(self) -> None:
        """Publish everything now."""
        self._publish_metrics()
        self._publish_usage()

    def _publish_metrics(self) -> None:
        own = {"": self._meter.tally.families, "engine": self._engine}
        self._publish(self._tracker, own, self._meter)

    def _publish_usage(self) -> None:
        tenants = self._meter.tenants
        self._publish(self._usage_tracker, {"": tenants.tally.families}, tenants)

    def _publish(
        self,
        tracker: DeltaTracker,
        own: Mapping[str, Callable[[], Iterable[Family]]],
        meter: CellTallies,
    ) -> None:
        """Send each cell its share: of its own streams, and at home of the gateway's sources."""
        home = self._fleet.home
        sessions: dict[str, Session] = {}
        if home is not None:
            for source, read in own.items():
                tracker.give(home.coordinator, read(), source=source)
            sessions[home.coordinator] = home
        for cell, tally in meter.by_cell():
            is_known = cell in self._fleet.cells
            session = self._fleet.session(cell) if is_known else home
            if session is None:
                continue
            tracker.give(session.coordinator, tally.families(), source=f"cell {cell}")
            sessions[session.coordinator] = session
            if not is_known:
                # The cell is gone for good, and the home cell has taken over its remaining growth.
                meter.forget(cell)
                tracker.forget(f"cell {cell}")
        for coordinator, session in sessions.items():
            if (message := tracker.message(coordinator)).families:
                session.send(message)

"""The sum of all gateways' measurements, in which no total ever falls.

Each message of a gateway holds its totals; their growth since its last message is added, so
gateways may come and go and messages may repeat. Unknown names are ignored, and so are series of
one name above `SERIES_MAX`. Series whose labels are known exist from the start. The server calls
this module, for current sessions only. Growth of tenants' measures goes to the usage history.
"""

from collections import OrderedDict
from collections.abc import Callable

from coordinator.protocol.log_config import UsageConfig
from coordinator.protocol.metrics_wire import (
    OWN,
    USAGE,
    VLLM_PREFIX,
    Family,
    Measure,
    Measures,
    Tally,
)
from coordinator.telemetry.usage_history import UsageHistory

GATEWAYS_REMEMBERED = 1_024
"""Number of gateways whose last totals are stored; the least recently heard are forgotten."""
FAMILIES_MAX = 256
SERIES_MAX = 512
"""Series of one name, over all gateways, at most."""
USAGE_SERIES_MAX = 3 * (1_024 + 1)
"""Series of one measure of tenants from one gateway, at most: all tiers of all its tenants."""
LABEL_CHARS_MAX = 64

_Totals = dict[tuple[str, tuple[str, ...]], tuple[float, tuple[int, ...]]]


class MetricsAggregator:
    """The totals of a cell's gateways."""

    def __init__(
        self, usage: UsageHistory | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`clock` returns the time of day in Unix seconds."""
        bounds = UsageConfig()
        self.usage = usage or UsageHistory(bounds.tenants_max, bounds.days)
        self._clock = clock
        self.tally = Tally()
        self.tally.begin(*OWN.values())
        self._measures: dict[str, Measure] = {}
        self._last_totals: OrderedDict[str, _Totals] = OrderedDict()

    def take(self, gateway: str, measures: Measures) -> None:
        """Add the growth since the gateway's last message."""
        totals = self._last_totals.setdefault(gateway, {})
        self._last_totals.move_to_end(gateway)
        while len(self._last_totals) > GATEWAYS_REMEMBERED:
            self._last_totals.popitem(last=False)
        for family in measures.families:
            if (own := USAGE.get(family.name)) is not None:
                self._take_usage(totals, family, own)
                continue
            measure = self._known(family)
            if measure is not None:
                self._take(totals, family, measure)

    def _take_usage(self, totals: _Totals, family: Family, measure: Measure) -> None:
        """Add the growth of a measure of tenants."""
        for series in family.series[:USAGE_SERIES_MAX]:
            if len(series.labels) != len(measure.labels):
                continue
            if any(len(label) > LABEL_CHARS_MAX for label in series.labels):
                continue
            before, _ = totals.get((family.name, series.labels), (0.0, ()))
            totals[family.name, series.labels] = (series.value, ())
            if series.value > before:
                self.usage.add(measure, series.labels, series.value - before, self._clock())

    def _known(self, family: Family) -> Measure | None:
        """Return the measure of a family, or None to ignore the family."""
        own = OWN.get(family.name)
        known = self._measures.get(family.name, own)
        if known is None:
            if not family.name.startswith(VLLM_PREFIX) or len(self._measures) >= FAMILIES_MAX:
                return None
            known = Measure(family.name, family.text, family.labels, family.bounds)
        self._measures[family.name] = known
        is_same = (known.labels, known.bounds) == (family.labels, family.bounds)
        return known if is_same else None

    def _take(self, totals: _Totals, family: Family, measure: Measure) -> None:
        buckets = len(measure.bounds) + 1 if measure.bounds else 0
        for series in family.series:
            known = self.tally.series_of(measure)
            is_fit = len(series.labels) == len(measure.labels) and len(series.counts) == buckets
            is_short = all(len(label) <= LABEL_CHARS_MAX for label in series.labels)
            if not (is_fit and is_short):
                continue
            if series.labels not in known and len(known) >= SERIES_MAX:
                continue
            value, counts = totals.get((family.name, series.labels), (0.0, (0,) * buckets))
            grown = tuple(new - old for new, old in zip(series.counts, counts, strict=True))
            totals[family.name, series.labels] = (series.value, series.counts)
            if series.value >= value and min(grown, default=0) >= 0:
                self.tally.add(measure, series.labels, series.value - value, grown)

"""Requests and tokens of each tenant and tier, by hour and by day (UTC). Pure.

The aggregator adds the growth of gateways' totals. Every bound has a name; what exceeds the bound
on tenants counts as `other`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from coordinator.protocol.metrics_wire import OTHER_TENANTS, USAGE, Measure

HOURS_MAX = 48
"""Hours that are remembered one by one."""
HOUR_S = 3_600
DAY_S = 24 * HOUR_S

By = Literal["hour", "day"]
Labels = tuple[str, ...]

FIELD_OF = {name: name.removeprefix("aileron_tenant_") for name in USAGE}
"""Measure -> the field that shows it."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of a tenant in a tier within one hour or day, which begins at `begin_s`."""

    begin_s: int
    tenant: str
    tier: str
    counts: dict[str, int]


@dataclass(slots=True)
class _Periods:
    """The newest hours or days, oldest first."""

    length_s: int
    periods_max: int
    rows: "OrderedDict[int, dict[Labels, dict[str, float]]]" = field(default_factory=OrderedDict)

    def add(self, name: str, labels: Labels, growth: float, now_s: float) -> None:
        begin_s = int(now_s // self.length_s) * self.length_s
        # A clock that was set back must not reorder the periods.
        begin_s = max(begin_s, next(reversed(self.rows), begin_s))
        rows = self.rows.setdefault(begin_s, {})
        counts = rows.setdefault(labels, dict.fromkeys(FIELD_OF.values(), 0.0))
        counts[name] += growth

    def forget(self, now_s: float) -> None:
        oldest_s = (int(now_s // self.length_s) - self.periods_max + 1) * self.length_s
        while self.rows and next(iter(self.rows)) < oldest_s:
            self.rows.popitem(last=False)


class UsageHistory:
    """The usage that a coordinator has counted since its start."""

    def __init__(self, tenants_max: int, days_max: int) -> None:
        """`tenants_max` tenants have a name at most, among the remembered days."""
        self._tenants_max = tenants_max
        self._hours = _Periods(HOUR_S, HOURS_MAX)
        self._days = _Periods(DAY_S, days_max)
        self._tenants: set[str] = set()
        self.totals: dict[Labels, dict[str, float]] = {}
        """Since the start, for the metric: (tenant, tier) -> field -> count."""

    def add(self, measure: Measure, labels: Labels, growth: float, now_s: float) -> None:
        """Add growth of a measure of `USAGE`; `now_s` is the time of day, in Unix seconds."""
        self._forget(now_s)
        tenant, tier = labels
        if tenant not in self._tenants:
            if len(self._tenants) >= self._tenants_max:
                tenant = OTHER_TENANTS
            else:
                self._tenants.add(tenant)
        name = FIELD_OF[measure.name]
        for periods in (self._hours, self._days):
            periods.add(name, (tenant, tier), growth, now_s)
        counts = self.totals.setdefault((tenant, tier), dict.fromkeys(FIELD_OF.values(), 0.0))
        counts[name] += growth

    def rows(self, by: By, last: int, tenant: str | None, now_s: float) -> Iterator[UsageRow]:
        """Yield the rows of the newest `last` hours or days, oldest first, then by tenant."""
        self._forget(now_s)
        periods = self._hours if by == "hour" else self._days
        first_s = (int(now_s // periods.length_s) - last + 1) * periods.length_s
        for begin_s, rows in periods.rows.items():
            if begin_s >= first_s:
                for (name, tier), counts in sorted(rows.items()):
                    if tenant is None or name == tenant:
                        whole = {key: round(value) for key, value in counts.items()}
                        yield UsageRow(begin_s, name, tier, whole)

    def _forget(self, now_s: float) -> None:
        before = len(self._days.rows)
        self._hours.forget(now_s)
        self._days.forget(now_s)
        if len(self._days.rows) < before:
            # The names of tenants that only forgotten days hold are free again.
            self._tenants = {
                tenant
                for rows in self._days.rows.values()
                for tenant, _ in rows
                if tenant != OTHER_TENANTS
            }
            # A counter must not fall, so a forgotten tenant leaves the totals as a whole.
            self.totals = {
                labels: counts
                for labels, counts in self.totals.items()
                if labels[0] in self._tenants or labels[0] == OTHER_TENANTS
            }

"""Compares two reports: every metric, the ratio second / first, and thresholds. Pure.

A threshold `ttft_p50_ms>1.05` applies to the ratio, `b.failed>0` to the second report's own value.
A threshold on something that was not measured counts as broken: an impossible check must not pass.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loadgen.errors import UsageError
from loadgen.report.records import FailureKind

LATENCIES = {
    name: f"{name}_ms"
    for name in ("ttft", "tpot", "token_gap", "chunk_gap", "max_chunk_gap", "e2e")
}
LEVELS = ("mean", "p50", "p90", "p95", "p99", "max")
OPERATORS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
THRESHOLD_SHAPE = re.compile(
    r"\s*(?P<second>b\.)?(?P<metric>\w+)\s*(?P<sign>[<>]=?)\s*(?P<limit>[-+0-9.eE]+)\s*"
)


class Better(StrEnum):
    """Which direction of a metric is an improvement."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Metric:
    """A name for one number in a slice of a report, and its place."""

    name: str
    path: tuple[str, str]
    better: Better


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of both reports; values are None where they were not measured."""

    metric: str
    better: Better
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """second / first; 1 if both are 0, None if it has no finite value."""
        if self.first is None or self.second is None:
            return None
        if self.first == 0:
            return 1.0 if self.second == 0 else None
        return self.second / self.first

    @property
    def second_is_better(self) -> bool | None:
        """Whether the second report improved, None if equal or if no direction is better."""
        if self.first is None or self.second is None or self.first == self.second:
            return None
        if self.better is Better.NEITHER:
            return None
        return (self.second > self.first) == (self.better is Better.HIGHER)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A condition that fails the comparison; `on_second` applies to b itself, not to the ratio."""

    text: str
    metric: str
    on_second: bool
    sign: str
    limit: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of one scope and a sentence for each broken threshold."""

    scope: str
    rows: tuple[Row, ...]
    broken: tuple[str, ...]


def all_metrics() -> tuple[Metric, ...]:
    """Return every metric that can be compared, in the order of the table."""
    higher, lower, neither = Better.HIGHER, Better.LOWER, Better.NEITHER
    return (
        Metric("requests_per_s", ("throughput", "requests_per_s"), higher),
        Metric("output_tokens_per_s", ("throughput", "output_tokens_per_s"), higher),
        *(
            Metric(f"{name}_{level}_ms", (group, level), lower)
            for name, group in LATENCIES.items()
            for level in LEVELS
        ),
        Metric("good_share", ("goodput", "good_share"), higher),
        Metric("good_per_s", ("goodput", "good_per_s"), higher),
        Metric("sent", ("requests", "sent"), neither),
        Metric("ok", ("requests", "ok"), higher),
        Metric("failed", ("requests", "failed"), lower),
        *(Metric(kind.value, ("errors", kind.value), lower) for kind in FailureKind),
    )


def parse_threshold(text: str) -> Threshold:
    """Read `METRIC>NUMBER`, or `b.METRIC>NUMBER` for the second report's own value."""
    match = THRESHOLD_SHAPE.fullmatch(text)
    limit = _number(match["limit"]) if match else None
    if match is None or limit is None:
        raise UsageError(
            f"--fail-if '{text}' does not look like ttft_p50_ms>1.05 (ratio of b to a) "
            "or b.failed>0 (value of b)."
        )
    known = {metric.name for metric in all_metrics()}
    if match["metric"] not in known:
        raise UsageError(
            f"--fail-if '{text}' names no metric; known are {', '.join(sorted(known))}."
        )
    return Threshold(text.strip(), match["metric"], bool(match["second"]), match["sign"], limit)


def compare(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    *,
    scope: str = "total",
    thresholds: Sequence[Threshold] = (),
) -> Comparison:
    """Compare one scope of both reports and check the thresholds."""
    slices = slice_of(first, scope, "first"), slice_of(second, scope, "second")
    rows = tuple(
        Row(metric.name, metric.better, *(_value(part, metric.path) for part in slices))
        for metric in all_metrics()
    )
    by_name = {row.metric: row for row in rows}
    broken = (check(threshold, by_name[threshold.metric]) for threshold in thresholds)
    return Comparison(scope, rows, tuple(filter(None, broken)))


def slice_of(report: Mapping[str, Any], scope: str, which: str) -> Mapping[str, Any]:
    """Return the part of a report that `total`, `tier:NAME` or `phase:NAME` names."""
    kind, _, name = scope.partition(":")
    if scope == "total":
        parts = {name: report["total"]}
    elif kind == "tier" and name:
        parts = report["tiers"]
    elif kind == "phase" and name:
        parts = {phase["name"]: phase for phase in report["phases"]}
    else:
        raise UsageError(f"--scope '{scope}' is not total, tier:NAME or phase:NAME.")
    if name not in parts:
        known = ", ".join(parts) or "none"
        raise UsageError(f"The {which} report has no {kind} '{name}'; it has {known}.")
    part: Mapping[str, Any] = parts[name]
    return part


def check(threshold: Threshold, row: Row) -> str | None:
    """Return why the threshold is broken, or None if it holds."""
    if row.second is None or (row.first is None and not threshold.on_second):
        return f"{threshold.text}: {row.metric} was not measured"
    # A rise from 0 has no finite ratio; it counts as above every limit.
    ratio = math.inf if row.ratio is None else row.ratio
    value = row.second if threshold.on_second else ratio
    if not OPERATORS[threshold.sign](value, threshold.limit):
        return None
    return f"{threshold.text}: it is {value:.4g}"


def as_json(comparison: Comparison, names: Sequence[str]) -> dict[str, object]:
    """Return the comparison for machines; a ratio without a finite value is null."""
    return {
        "names": list(names),
        "scope": comparison.scope,
        "metrics": [
            {
                "metric": row.metric,
                "better": row.better.value,
                "a": row.first,
                "b": row.second,
                "ratio": None if row.ratio is None else round(row.ratio, 6),
            }
            for row in comparison.rows
        ],
        "broken_thresholds": list(comparison.broken),
    }


def _value(part: Mapping[str, Any], path: tuple[str, str]) -> float | None:
    value = part.get(path[0], {}).get(path[1])
    return float(value) if isinstance(value, int | float) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

"""Arithmetic on what clients saw: percentiles, steady decode steps, gaps over switches. Pure.

Times are seconds of one monotonic clock unless a name ends in `_ms`.
"""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from loadgen.report.stats import percentile

Results = dict[str, Any]
"""One JSON file of the benchmark."""

DEVICE_MEMORY = '"device_memory"'
"""In lines of a rank's log that say what a stage of its start took."""
MEMORY_FIELDS = ("rank", "stage", "taken", "used", "allocated", "reserved", "outside")
"""Of those lines, what is kept; bytes from `taken` on."""


def find(results: Results, *path: str) -> Any:
    """What stands at a path of keys, or None."""
    found: Any = results
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def sizes(results: Results, kind: str) -> list[str]:
    """All sizes of a kind that any server was measured with, in order."""
    found = {size for server in results["servers"].values() for size in server.get(kind, {})}
    return sorted((size for size in found if size.isdigit()), key=int)


def loads(results: Results) -> list[str]:
    """Return the names of all loads with which any server was saturated, in order."""
    named = (size for server in results["servers"].values() for size in server.get("saturated", {}))
    return list(dict.fromkeys(named)) or ["all"]


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """ours / theirs, if both were measured."""
    return ours / theirs if ours is not None and theirs else None


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step of one engine or leader, as they reached the client."""

    time_s: float
    source: int
    """Which engine or rank sent it."""
    epoch: int
    """aileron's layout number; 0 for static engines."""
    streams: int
    """Streams that got tokens in it."""


def spread(values: Iterable[float]) -> dict[str, float]:
    """Count, p50, p99 and max; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "count": len(ordered),
        "p50": round(percentile(ordered, 50), 4),
        "p99": round(percentile(ordered, 99), 4),
        "max": round(ordered[-1], 4),
    }


WINDOW_STEPS = 8
"""A client that was held up gets several steps at once: single intervals may be near 0."""


def steady_steps(batches: Iterable[Batch]) -> dict[int, dict[str, float]]:
    """Source -> its full number of streams, and the time of a step that decodes just these.

    A step counts if it and the one before it served the full number: so none of it went to a
    prompt, and none of the streams had ended. The median is that of means over a few steps.
    """
    by_source: dict[int, list[Batch]] = defaultdict(list)
    for batch in batches:
        by_source[batch.source].append(batch)
    results = {}
    for source, series in sorted(by_source.items()):
        runs = _runs(series)
        if not runs:
            continue
        full = _full(runs)
        steps = [later - earlier for run in runs[full] for earlier, later in pairwise(run)]
        window = max(1, min(WINDOW_STEPS, len(steps) // 2))
        means = [
            (run[place + window] - run[place]) / window
            for run in runs[full]
            for place in range(len(run) - window)
        ]
        results[source] = {
            "streams": full,
            "steps": len(steps),
            "median_ms": round(statistics.median(means or steps) * 1e3, 4),
            "mean_ms": round(statistics.fmean(steps) * 1e3, 4),
            "p99_ms": round(percentile(sorted(steps), 99) * 1e3, 4),
        }
    return results


def _runs(series: Iterable[Batch]) -> dict[int, list[list[float]]]:
    """Number of streams -> times of the steps of each stretch that served just so many."""
    runs: dict[int, list[list[float]]] = defaultdict(list)
    for streams, stretch in groupby(series, key=lambda batch: batch.streams):
        times = [batch.time_s for batch in stretch]
        if len(times) > 1:
            runs[streams].append(times)
    return runs


def _full(runs: Mapping[int, Sequence[Sequence[float]]]) -> int:
    """The largest number of streams that lasted: streams come and go a few at a time."""
    steps = {streams: sum(len(run) - 1 for run in each) for streams, each in runs.items()}
    return max(streams for streams, count in steps.items() if count >= max(steps.values()) / 4)


def merge_steady(sources: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One TPOT of engines that decoded at the same time: the median engine's."""
    if not sources:
        raise ValueError("no steady decode step was seen")
    return {
        "median_ms": round(statistics.median(one["median_ms"] for one in sources), 4),
        "mean_ms": round(statistics.fmean(one["mean_ms"] for one in sources), 4),
        "steps": int(sum(one["steps"] for one in sources)),
        "streams": [int(one["streams"]) for one in sources],
    }


def merge_saturated(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Throughput of engines that worked at the same time: all tokens over the whole wall time."""
    wall_s = max(part["ended_s"] for part in parts) - min(part["started_s"] for part in parts)
    tokens = sum(part["tokens"] for part in parts)
    return {
        "requests": int(sum(part["requests"] for part in parts)),
        "tokens": int(tokens),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 1),
    }


def cut_over_gaps(batches: Iterable[Batch]) -> dict[int, float]:
    """Epoch -> ms from the last token of the layout before to the slowest leader's first token.

    Only leaders that send something in the epoch count: one without tasks is not late.
    """
    last: dict[int, float] = {}
    first: dict[int, dict[int, float]] = defaultdict(dict)
    for batch in batches:
        last[batch.epoch] = max(batch.time_s, last.get(batch.epoch, 0.0))
        known = first[batch.epoch].get(batch.source, batch.time_s)
        first[batch.epoch][batch.source] = min(batch.time_s, known)
    return {
        epoch: (max(first[epoch].values()) - last[before]) * 1e3
        for before, epoch in pairwise(sorted(last))
    }


def stream_gaps(
    streams: Iterable[tuple[Sequence[float], Sequence[int]]],
) -> tuple[dict[int, list[float]], list[float]]:
    """From (times, epochs) of each stream's tokens: gaps in ms.

    Returns epoch -> one gap per stream that crossed into it, and all gaps within an epoch.
    """
    crossing: dict[int, list[float]] = defaultdict(list)
    within: list[float] = []
    for times, epochs in streams:
        for (before_s, old), (after_s, new) in pairwise(zip(times, epochs, strict=True)):
            gap_ms = (after_s - before_s) * 1e3
            if new == old:
                within.append(gap_ms)
            else:
                crossing[new].append(gap_ms)
    return dict(crossing), within


def longest_gap(times: Sequence[float], start: float, end: float) -> tuple[float, float]:
    """Return the longest gap between two of these times that overlaps a span: its begin and end.

    Without any, it takes no time at the begin of the span.
    """
    gaps = ((a, b) for a, b in pairwise(times) if b > start and a < end)
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=(start, start))


UNKNOWN_AT_ZERO = frozenset({"gap_ms_max"})
"""Fields of a switch record whose 0 says that nothing was measured; others are null then."""


def phases(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Every time field of switch records -> its spread over the switches."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            is_time = name.endswith("_ms") or "_ms_" in name
            is_known = isinstance(value, int | float) and (value or name not in UNKNOWN_AT_ZERO)
            if is_time and is_known:
                values[name].append(float(value))
    return {name: spread(each) for name, each in values.items()}


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over switches of what records count: tasks by plan, bytes, tokens."""
    sums: Counter[str] = Counter()
    for record in records:
        counted = {f"tasks_{plan}": count for plan, count in record.get("tasks", {}).items()}
        counted |= {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and name.endswith(("_bytes", "_tokens", "tokens"))
        }
        sums.update(counted)
    return {name: value for name, value in sorted(sums.items()) if value}


def idle_steps(records: Iterable[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """From recorded steps to `<width> wide, <streams> streams` -> busy, gap and share of idle time.

    Records have width, requests, tokens, busy_ms, gap_ms; only decode steps that follow one of
    the same size count.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    before: tuple[float, ...] = ()
    for record in records:
        kind = (record["width"], record["requests"], record["tokens"])
        if kind == before and record["requests"] == record["tokens"] and record["gap_ms"] >= 0:
            name = f"tp{record['width']:.0f}, {record['requests']:.0f} streams"
            groups[name].append((record["busy_ms"], record["gap_ms"]))
        before = kind
    return {
        name: {
            "steps": len(steps),
            "busy_ms": round(statistics.median(busy for busy, _ in steps), 4),
            "gap_ms": round(statistics.median(gap for _, gap in steps), 4),
            "gap_mean_ms": round(statistics.fmean(gap for _, gap in steps), 4),
            "idle_share": round(
                sum(gap for _, gap in steps) / max(1e-9, sum(busy + gap for busy, gap in steps)), 5
            ),
        }
        for name, steps in sorted(groups.items())
    }


def memory_stages(log: str) -> list[dict[str, Any]]:
    """What ranks' logs, one JSON object per line, say that each stage of a start took."""
    return [{name: line[name] for name in MEMORY_FIELDS} for line in told(log, DEVICE_MEMORY)]


def told(log: str, event: str) -> list[dict[str, Any]]:
    """What ranks' logs, one JSON object per line, say of an event, given in its quotes."""
    return [json.loads(line) for line in log.splitlines() if event in line]

"""The run second by second: arrivals, ends, delivered tokens and latencies.

Pure: folds the records into columns of equal length, one entry per `INTERVAL_S`. A request's TTFT
appears in the second of its send, a gap in the second of its later chunk, an error in the second it
happened. `good` (answers within their tier's limits) appears in the second they were due, for
comparison with the load. `tokens` counts every delivered token, also of streams that later failed.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from loadgen.report.records import (
    NOT_THE_SERVERS_FAULT,
    FailureKind,
    RequestRecord,
    chunk_gaps_ms,
    due_s,
    tokens_per_chunk,
    ttft_ms,
)
from loadgen.report.stats import median, percentile, rounded

INTERVAL_S = 1.0

Column = list[float | int | None]


def build_series(
    records: Sequence[RequestRecord],
    duration_s: float,
    is_good: Callable[[RequestRecord], bool],
) -> dict[str, object]:
    """Return columns over the seconds of the run; `t_s` is the start of each second."""
    bins = max(1, math.ceil(duration_s / INTERVAL_S))
    sent = [record.sent_s for record in records if record.sent_s is not None]
    good = [at_s for r in records if (at_s := due_s(r)) is not None and is_good(r)]
    ended_ok = [record.ended_s for record in records if record.ok]
    failed = [
        record.ended_s
        for record in records
        if record.failure and record.failure.kind not in NOT_THE_SERVERS_FAULT
    ]
    dropped = [record.ended_s for record in records if _is_dropped(record)]
    return {
        "interval_s": INTERVAL_S,
        "t_s": [index * INTERVAL_S for index in range(bins)],
        "arrivals": _counts(sent, bins),
        "good": _counts(good, bins),
        "completions": _counts(ended_ok, bins),
        "errors": _counts(failed, bins),
        "dropped_by_client": _counts(dropped, bins),
        "tokens": _tokens(records, bins),
        "ttft_p50_ms": _grouped(_ttft_samples(records), bins, median),
        "ttft_p90_ms": _grouped(_ttft_samples(records), bins, _ninth_decile),
        "ttft_max_ms": _grouped(_ttft_samples(records), bins, _highest),
        "chunk_gap_p50_ms": _grouped(_gap_samples(records), bins, median),
        "chunk_gap_max_ms": _grouped(_gap_samples(records), bins, _highest),
        "in_flight": _in_flight(records, duration_s, bins),
    }


def _is_dropped(record: RequestRecord) -> bool:
    return record.failure is not None and record.failure.kind is FailureKind.DROPPED_BY_CLIENT


def _bin(at_s: float, bins: int) -> int:
    return min(max(int(at_s / INTERVAL_S), 0), bins - 1)


def _counts(times_s: Sequence[float], bins: int) -> Column:
    counts = [0] * bins
    for at_s in times_s:
        counts[_bin(at_s, bins)] += 1
    return list(counts)


def _tokens(records: Sequence[RequestRecord], bins: int) -> Column:
    tokens = [0.0] * bins
    for record in records:
        weight = tokens_per_chunk(record)
        for at_s in record.answer.chunk_times_s:
            tokens[_bin(at_s, bins)] += weight
    return [rounded(value) for value in tokens]


def _ttft_samples(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    return [
        (record.sent_s, latency_ms)
        for record in records
        if record.sent_s is not None and (latency_ms := ttft_ms(record)) is not None
    ]


def _gap_samples(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    return [
        sample
        for record in records
        for sample in zip(record.answer.chunk_times_s[1:], chunk_gaps_ms(record), strict=True)
    ]


def _grouped(
    samples: Sequence[tuple[float, float]],
    bins: int,
    fold: Callable[[Sequence[float]], float | None],
) -> Column:
    groups: dict[int, list[float]] = defaultdict(list)
    for at_s, value in samples:
        groups[_bin(at_s, bins)].append(value)
    return [fold(groups.get(index, [])) for index in range(bins)]


def _highest(values: Sequence[float]) -> float | None:
    return rounded(max(values)) if values else None


def _ninth_decile(values: Sequence[float]) -> float | None:
    return rounded(percentile(sorted(values), 90)) if values else None


def _in_flight(records: Sequence[RequestRecord], duration_s: float, bins: int) -> Column:
    """Return the mean number of requests in flight per second; the last one may be shorter."""
    busy_s = [0.0] * bins
    for record in records:
        if record.sent_s is None:
            continue
        for index in range(_bin(record.sent_s, bins), _bin(record.ended_s, bins) + 1):
            start_s, end_s = index * INTERVAL_S, (index + 1) * INTERVAL_S
            busy_s[index] += max(0.0, min(record.ended_s, end_s) - max(record.sent_s, start_s))
    last_s = duration_s - (bins - 1) * INTERVAL_S
    widths_s = [INTERVAL_S] * (bins - 1) + [last_s if last_s > 0 else INTERVAL_S]
    return [rounded(busy / width) for busy, width in zip(busy_s, widths_s, strict=True)]

"""The JSON report: the load and its outcome, per phase, per tier and in total.

Pure: `build_report` folds records into one dictionary; `runner` adds what only the machine knows.
Latencies are over whole answers of the requests *scheduled* in a slice; throughput counts what
whole answers delivered *during* the slice's window. Keys are stable: a slice always has all of
them, with None for numbers without a measurement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loadgen.report.records import (
    MS_PER_S,
    FailureKind,
    RequestRecord,
    chunk_gaps_ms,
    e2e_ms,
    lag_ms,
    max_chunk_gap_ms,
    output_tokens,
    served_at_other_tier,
    token_gaps_ms,
    tokens_per_chunk,
    tpot_ms,
    ttft_from_send_ms,
    ttft_ms,
)
from loadgen.report.series import build_series
from loadgen.report.sessions import summarise_sessions
from loadgen.report.slo import Slos, is_good
from loadgen.report.stats import rounded, share, summarise
from loadgen.workload.arrivals import Phase, phase_starts_s

SCHEMA = "aileron.loadgen.report"
SCHEMA_VERSION = 3
LATE_SEND_MS = 10.0


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the run, [start_s, end_s)."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Its length in seconds."""
        return max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is over; `phases` is empty for a closed loop.

    `session_turns` has the planned number of turns of every session.
    """

    records: tuple[RequestRecord, ...]
    phases: tuple[Phase, ...]
    planned_requests: int
    duration_s: float
    interrupted: bool
    session_turns: Mapping[str, int] = field(default_factory=dict)


def build_report(run: Finished, slos: Slos, *, keep_records: bool) -> dict[str, object]:
    """Return the part of the report that follows from the records."""
    whole = Window(0.0, run.duration_s)
    records = run.records
    report: dict[str, object] = {
        "duration_s": rounded(run.duration_s),
        "interrupted": run.interrupted,
        "planned_requests": run.planned_requests,
        "unsent_requests": run.planned_requests - len(records),
        "scheduling": _scheduling(records),
        "total": summarise_slice(records, records, whole, slos),
        "tiers": _by_tier(records, records, whole, slos),
        "phases": [_phase(run, index, phase, slos) for index, phase in enumerate(_phases_of(run))],
        "slos": {
            tier: {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
            for tier, slo in sorted(slos.by_tier.items())
        },
        "sessions": summarise_sessions(records, run.session_turns) if run.session_turns else None,
        "series": build_series(records, run.duration_s, lambda record: is_good(record, slos)),
    }
    if keep_records:
        report["records"] = [record_as_json(record) for record in records]
    return report


def summarise_slice(
    scheduled: Sequence[RequestRecord],
    delivered: Sequence[RequestRecord],
    window: Window,
    slos: Slos,
) -> dict[str, object]:
    """Return one slice: counts and latencies of `scheduled`, throughput of `delivered`."""
    whole = [record for record in scheduled if record.ok]
    return {
        "requests": _counts(scheduled),
        "errors": _errors(scheduled),
        "error_codes": _error_codes(scheduled),
        "tokens": _tokens(whole),
        "throughput": _throughput(delivered, window),
        "ttft_ms": summarise(ttft_ms(record) for record in whole),
        "ttft_from_send_ms": summarise(ttft_from_send_ms(record) for record in whole),
        "tpot_ms": summarise(tpot_ms(record) for record in whole),
        "token_gap_ms": summarise(gap for record in whole for gap in token_gaps_ms(record)),
        "chunk_gap_ms": summarise(gap for record in whole for gap in chunk_gaps_ms(record)),
        "max_chunk_gap_ms": summarise(max_chunk_gap_ms(record) for record in whole),
        "e2e_ms": summarise(e2e_ms(record) for record in whole),
        "lag_ms": summarise(lag_ms(record) for record in scheduled),
        "goodput": _goodput(scheduled, window, slos),
    }


def record_as_json(record: RequestRecord) -> dict[str, object]:
    """Return one raw record; times in seconds since the start of the run, latencies in ms."""
    planned, answer = record.planned, record.answer
    return {
        "index": planned.index,
        "request_id": planned.request_id,
        "phase_index": planned.phase_index,
        "tier": planned.tier,
        "prefix_group": planned.prefix_group,
        "session": planned.session,
        "turn": None if planned.session is None else planned.turn + 1,
        "history_tokens": planned.history_tokens,
        "prompt_tokens_asked": planned.prompt_tokens,
        "output_tokens_asked": planned.output_tokens,
        "planned_s": planned.at_s,
        "sent_s": record.sent_s,
        "ended_s": record.ended_s,
        "status": record.reply.status if record.reply else None,
        "served_tier": record.reply.tier if record.reply else None,
        "server_request_id": record.reply.request_id if record.reply else None,
        "finish_reason": answer.finish_reason,
        "saw_done": answer.saw_done,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": output_tokens(record),
        "keep_alives": answer.keep_alives,
        "ttft_ms": ttft_ms(record),
        "tpot_ms": tpot_ms(record),
        "max_chunk_gap_ms": max_chunk_gap_ms(record),
        "e2e_ms": e2e_ms(record),
        "chunk_times_s": [round(at_s, 6) for at_s in answer.chunk_times_s],
        "error": record.failure.kind.value if record.failure else None,
        "error_code": record.failure.code if record.failure else None,
        "error_message": record.failure.message if record.failure else None,
    }


def _phases_of(run: Finished) -> tuple[Phase, ...]:
    return run.phases or (Phase("closed", 0.0, run.duration_s),)


def _phase(run: Finished, index: int, phase: Phase, slos: Slos) -> dict[str, object]:
    start_s = min(phase_starts_s(_phases_of(run))[index], run.duration_s)
    window = Window(start_s, min(start_s + phase.duration_s, run.duration_s))
    scheduled = [record for record in run.records if record.planned.phase_index == index]
    return {
        "index": index,
        "name": phase.name,
        "rate_per_s": phase.rate_per_s if run.phases else None,
        "start_s": rounded(window.start_s),
        "end_s": rounded(window.end_s),
        **summarise_slice(scheduled, run.records, window, slos),
        "tiers": _by_tier(scheduled, run.records, window, slos),
    }


def _by_tier(
    scheduled: Sequence[RequestRecord],
    delivered: Sequence[RequestRecord],
    window: Window,
    slos: Slos,
) -> dict[str, object]:
    tiers = dict.fromkeys(record.planned.tier for record in delivered if record.planned.tier)
    return {
        tier: summarise_slice(
            [record for record in scheduled if record.planned.tier == tier],
            [record for record in delivered if record.planned.tier == tier],
            window,
            slos,
        )
        for tier in sorted(tiers)
    }


def _counts(scheduled: Sequence[RequestRecord]) -> dict[str, int]:
    kinds = Counter(record.failure.kind for record in scheduled if record.failure)
    dropped, stopped = kinds[FailureKind.DROPPED_BY_CLIENT], kinds[FailureKind.CANCELLED]
    whole = sum(record.ok for record in scheduled)
    return {
        "scheduled": len(scheduled),
        "sent": len(scheduled) - dropped,
        "ok": whole,
        "failed": len(scheduled) - whole - dropped - stopped,
        "cancelled": stopped,
        "dropped_by_client": dropped,
        "without_usage": sum(r.ok and r.answer.output_tokens is None for r in scheduled),
        "without_done": sum(r.ok and not r.answer.saw_done for r in scheduled),
        "served_at_other_tier": sum(served_at_other_tier(record) for record in scheduled),
    }


def _errors(scheduled: Sequence[RequestRecord]) -> dict[str, int]:
    kinds = Counter(record.failure.kind for record in scheduled if record.failure)
    return {kind.value: kinds[kind] for kind in FailureKind}


def _error_codes(scheduled: Sequence[RequestRecord]) -> dict[str, int]:
    codes = Counter(
        f"{record.failure.kind.value}:{record.failure.code}"
        for record in scheduled
        if record.failure
    )
    return dict(sorted(codes.items()))


def _tokens(whole: Sequence[RequestRecord]) -> dict[str, int]:
    return {
        "prompt": sum(record.answer.prompt_tokens or 0 for record in whole),
        "output": sum(output_tokens(record) for record in whole),
        "output_asked": sum(record.planned.output_tokens for record in whole),
    }


def _throughput(delivered: Sequence[RequestRecord], window: Window) -> dict[str, float | None]:
    whole = [record for record in delivered if record.ok]
    requests = sum(window.start_s <= record.ended_s <= window.end_s for record in whole)
    tokens = sum(_tokens_within(record, window) for record in whole)
    return {
        "window_s": rounded(window.length_s),
        "requests_per_s": share(requests, window.length_s),
        "output_tokens_per_s": share(tokens, window.length_s),
    }


def _tokens_within(record: RequestRecord, window: Window) -> float:
    chunks = sum(window.start_s <= at_s <= window.end_s for at_s in record.answer.chunk_times_s)
    return chunks * tokens_per_chunk(record)


def _goodput(
    scheduled: Sequence[RequestRecord], window: Window, slos: Slos
) -> dict[str, float | int | None]:
    slo = slos.shared(record.planned.tier for record in scheduled)
    good = sum(is_good(record, slos) for record in scheduled)
    return {
        "slo_ttft_ms": slo.ttft_ms,
        "slo_tpot_ms": slo.tpot_ms,
        "good": good,
        "good_share": share(good, len(scheduled)),
        "good_per_s": share(good, window.length_s),
    }


def _scheduling(records: Sequence[RequestRecord]) -> dict[str, object]:
    lags_ms = [lag for record in records if (lag := lag_ms(record)) is not None]
    return {
        "lag_ms": summarise(lags_ms),
        "late_send_ms": LATE_SEND_MS,
        "late_sends": sum(lag > LATE_SEND_MS for lag in lags_ms),
        "sent_span_s": rounded(_sent_span_ms(records) / MS_PER_S),
    }


def _sent_span_ms(records: Sequence[RequestRecord]) -> float:
    sent_s = [record.sent_s for record in records if record.sent_s is not None]
    return (max(sent_s) - min(sent_s)) * MS_PER_S if sent_s else 0.0

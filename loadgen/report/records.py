"""The outcome of each request, and the latencies computed from it.

A `RequestRecord` is made once, when its request is over, and never changes. Times are seconds since
the start of the run. A latency function returns None if the request did not get that far:
statistics count observations only.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from loadgen.workload.plan import PlannedRequest

MS_PER_S = 1000.0


class FailureKind(StrEnum):
    """Why a request did not give a whole answer."""

    REFUSED = "refused"  # 429 or 503 before the first byte
    HTTP_ERROR = "http_error"  # any other status than 200
    IN_BAND_ERROR = "in_band_error"  # an error event inside a 200 stream
    SILENT_TRUNCATION = "silent_truncation"  # a clean end without a finish_reason
    BAD_FINISH = "bad_finish"  # a finish_reason that OpenAI's API does not have
    BAD_STREAM = "bad_stream"  # not an event stream, or not JSON in it
    TIMEOUT = "timeout"  # no end within --timeout
    CONNECTION_ERROR = "connection_error"  # refused, reset, or cut in the middle
    CANCELLED = "cancelled"  # the user stopped the run
    DROPPED_BY_CLIENT = "dropped_by_client"  # never sent: --max-in-flight was reached


NOT_THE_SERVERS_FAULT = frozenset({FailureKind.CANCELLED, FailureKind.DROPPED_BY_CLIENT})


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure: its kind, the server's code or the HTTP status, and a message."""

    kind: FailureKind
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream's content until it ended or failed; `ended_s` is when it reported its end."""

    chunk_times_s: tuple[float, ...] = ()
    """When each chunk with text came; it may carry several tokens."""
    ended_s: float | None = None
    finish_reason: str | None = None
    saw_done: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    keep_alives: int = 0
    text: str | None = None
    """What the answer says, for the next turn of its session; None once nobody needs it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The head of the HTTP response: status, and a gateway's headers."""

    status: int
    request_id: str | None
    tier: str | None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from its plan to its end; `sent_s` is None if it was never sent."""

    planned: PlannedRequest
    sent_s: float | None
    ended_s: float
    reply: Reply | None
    answer: Answer
    failure: Failure | None

    @property
    def ok(self) -> bool:
        """Whether the whole answer arrived."""
        return self.failure is None


def never_sent(planned: PlannedRequest, now_s: float, in_flight: int) -> RequestRecord:
    """Return the record of a request dropped because `in_flight` others had reached the limit."""
    failure = Failure(
        FailureKind.DROPPED_BY_CLIENT, "max_in_flight", f"{in_flight} requests were in flight"
    )
    return RequestRecord(planned, None, now_s, None, Answer(), failure)


def cancelled(planned: PlannedRequest, sent_s: float, now_s: float) -> RequestRecord:
    """Return the record of a request that was in flight when the user stopped the run."""
    failure = Failure(FailureKind.CANCELLED, "cancelled", "the run was stopped")
    return RequestRecord(planned, sent_s, now_s, None, Answer(), failure)


def lag_ms(record: RequestRecord) -> float | None:
    """Return how late the request was sent; None in a closed loop or if unsent."""
    if record.sent_s is None or record.planned.at_s is None:
        return None
    return (record.sent_s - record.planned.at_s) * MS_PER_S


def due_s(record: RequestRecord) -> float | None:
    """Return the start of its latency: planned time, or send in a closed loop; None if unsent.

    Latencies counted from the send would hide that a late client spared the server load
    (coordinated omission, Gil Tene).
    """
    if record.sent_s is None or record.planned.at_s is None:
        return record.sent_s
    return min(record.planned.at_s, record.sent_s)


def ttft_ms(record: RequestRecord) -> float | None:
    """Return the time from when the request was due to its first token."""
    return _to_first_token_ms(record, due_s(record))


def ttft_from_send_ms(record: RequestRecord) -> float | None:
    """Return the time from send to first token, without the client's own delay."""
    return _to_first_token_ms(record, record.sent_s)


def tpot_ms(record: RequestRecord) -> float | None:
    """Return the mean time per token after the first; None with fewer than two chunks or tokens."""
    times_s, tokens = record.answer.chunk_times_s, output_tokens(record)
    if len(times_s) < 2 or tokens < 2:
        return None
    return (times_s[-1] - times_s[0]) * MS_PER_S / (tokens - 1)


def chunk_gaps_ms(record: RequestRecord) -> list[float]:
    """Return the time between each chunk with text and the one before it."""
    return [
        (later - earlier) * MS_PER_S for earlier, later in pairwise(record.answer.chunk_times_s)
    ]


def token_gaps_ms(record: RequestRecord) -> list[float]:
    """Return the chunk gaps, each divided by the tokens per chunk; none without `usage`.

    A chunk says nothing of how many tokens it carries, so this is the stream's mean.
    """
    if not record.answer.output_tokens:
        return []
    tokens = tokens_per_chunk(record)
    return [gap_ms / tokens for gap_ms in chunk_gaps_ms(record)]


def max_chunk_gap_ms(record: RequestRecord) -> float | None:
    """Return the longest pause between two chunks with text of this stream."""
    return max(chunk_gaps_ms(record), default=None)


def e2e_ms(record: RequestRecord) -> float | None:
    """Return the time from when the request was due to the end of a whole answer."""
    start_s = due_s(record)
    if start_s is None or not record.ok:
        return None
    return (record.ended_s - start_s) * MS_PER_S


def output_tokens(record: RequestRecord) -> int:
    """Return the answer's tokens: the server's `usage`, else the number of chunks with text."""
    counted = record.answer.output_tokens
    return len(record.answer.chunk_times_s) if counted is None else counted


def tokens_per_chunk(record: RequestRecord) -> float:
    """Return the mean number of tokens in a chunk with text of this stream."""
    chunks = len(record.answer.chunk_times_s)
    return output_tokens(record) / chunks if chunks else 0.0


def served_at_other_tier(record: RequestRecord) -> bool:
    """Return whether the server reported another tier than the one asked for."""
    asked, served = record.planned.tier, record.reply.tier if record.reply else None
    return asked is not None and served is not None and asked != served


def _to_first_token_ms(record: RequestRecord, start_s: float | None) -> float | None:
    if start_s is None or not record.answer.chunk_times_s:
        return None
    return (record.answer.chunk_times_s[0] - start_s) * MS_PER_S

"""Live counters of a run, for the progress line. Pure: every call passes the time.

The client counts chunks with text as they arrive, the loops count requests; `snapshot` returns the
totals and the rates of the last `RECENT_S`. The report does not use it.
"""

from collections import deque
from dataclasses import dataclass

from loadgen.report.stats import median

RECENT_S = 5.0
MAX_RECENT_SAMPLES = 50_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of the progress line."""

    planned: int
    sent: int
    done: int
    errors: int
    dropped: int
    chunks_per_s: float
    ttft_p50_ms: float | None

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet over."""
        return self.sent - self.done

    @property
    def over(self) -> int:
        """Planned requests that are done or dropped."""
        return self.done + self.dropped


class Meter:
    """Counts the events of a run."""

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._sent = self._done = self._errors = self._dropped = 0
        self._chunks: deque[tuple[float, int]] = deque(maxlen=MAX_RECENT_SAMPLES)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT_SAMPLES)

    def sent(self) -> None:
        """Count a sent request."""
        self._sent += 1

    def dropped(self) -> None:
        """Count a request that was not sent because too many were in flight."""
        self._dropped += 1

    def finished(self, *, failed: bool) -> None:
        """Count a sent request that is over."""
        self._done += 1
        self._errors += failed

    def chunks(self, count: int, now_s: float) -> None:
        """Count chunks with text."""
        self._chunks.append((now_s, count))

    def first_token(self, ttft_ms: float, now_s: float) -> None:
        """Record a stream's first token, `ttft_ms` after its send."""
        self._ttfts.append((now_s, ttft_ms))

    def snapshot(self, now_s: float) -> Snapshot:
        """Return totals so far, and the rates of the last `RECENT_S`."""
        self._forget_before(now_s - RECENT_S)
        span_s = min(RECENT_S, now_s)
        chunks = sum(count for _, count in self._chunks)
        return Snapshot(
            planned=self._planned,
            sent=self._sent,
            done=self._done,
            errors=self._errors,
            dropped=self._dropped,
            chunks_per_s=chunks / span_s if span_s > 0 else 0.0,
            ttft_p50_ms=median([latency for _, latency in self._ttfts]),
        )

    def _forget_before(self, oldest_s: float) -> None:
        while self._chunks and self._chunks[0][0] < oldest_s:
            self._chunks.popleft()
        while self._ttfts and self._ttfts[0][0] < oldest_s:
            self._ttfts.popleft()

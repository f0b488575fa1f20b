"""Measures during a run whether the load generator itself keeps up.

A slow generator makes a server look better than it is: late sends are load that the server never
gets (coordinated omission). So latencies count from the planned time, and these numbers show the
client's own part in them: the delay of its sends, the delay of the event loop that stamps the
tokens, and the load of its one core.
"""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.report.records import RequestRecord, lag_ms
from loadgen.report.stats import rounded, summarise

PROBE_PERIOD_S = 0.05
LATE_MS = 20.0
"""Limit on the p99 of send and event loop delays; above it, latencies are partly the client's."""
BUSY_CORE_SHARE = 0.9
MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Overhead:
    """The cost of a run to the client: its share of one core, and its event loop's delays."""

    cpu_share: float
    loop_delay_ms: Sequence[float]


class OverheadProbe:
    """Measures from `start` to `result`; `watch` runs beside the load until it is cancelled."""

    def __init__(self) -> None:
        self._delays_ms = array("d")
        self._start_s = self._start_cpu_s = 0.0

    def start(self) -> None:
        """Record the start of the run."""
        self._start_s, self._start_cpu_s = time.monotonic(), time.process_time()

    async def watch(self) -> None:
        """Sleep repeatedly, and record how much too long each sleep was."""
        while True:
            due_s = time.monotonic() + PROBE_PERIOD_S
            await asyncio.sleep(PROBE_PERIOD_S)
            self._delays_ms.append(max(0.0, time.monotonic() - due_s) * MS_PER_S)

    def result(self) -> Overhead:
        """Return the cost of the run so far."""
        wall_s = time.monotonic() - self._start_s
        cpu_s = time.process_time() - self._start_cpu_s
        return Overhead(cpu_s / wall_s if wall_s > 0 else 0.0, self._delays_ms)


def overhead_as_json(records: Sequence[RequestRecord], overhead: Overhead) -> dict[str, object]:
    """Return the numbers, and under `fell_behind` a sentence for each sign of a slow client."""
    return {
        "cpu_share": rounded(overhead.cpu_share),
        "loop_delay_ms": summarise(overhead.loop_delay_ms),
        "fell_behind": overload_warnings(records, overhead),
    }


def overload_warnings(records: Sequence[RequestRecord], overhead: Overhead) -> list[str]:
    """Return one sentence for each sign that the client did not keep up. Pure."""
    found = []
    late_ms = summarise(lag_ms(record) for record in records)["p99"]
    if late_ms is not None and late_ms > LATE_MS:
        found.append(
            "The client did not keep its schedule: 1% of the sends were more than "
            f"{late_ms:.0f} ms late. Latencies count from the planned time and contain that delay."
        )
    delay_ms = summarise(overhead.loop_delay_ms)["p99"]
    if delay_ms is not None and delay_ms > LATE_MS:
        found.append(
            f"The client's event loop was up to {delay_ms:.0f} ms late (p99), so token times are "
            "that inexact."
        )
    if overhead.cpu_share > BUSY_CORE_SHARE:
        found.append(
            f"The client used {overhead.cpu_share:.0%} of its one core: share the load among "
            "several generators."
        )
    return found

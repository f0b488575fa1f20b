"""The two ways to pace requests: an open loop follows its send times, a closed loop the answers.

In an open loop a send never waits for an answer; requests above `max_in_flight` are dropped and
recorded. Every request that a loop begins ends as exactly one record, even if the run is cancelled.
`send` is a parameter: loops know nothing of HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from loadgen.client.meter import Meter
from loadgen.report.records import RequestRecord, cancelled, never_sent
from loadgen.workload.plan import PlannedRequest

Prepare = Callable[[PlannedRequest], bytes]
Send = Callable[[PlannedRequest, bytes], Awaitable[RequestRecord]]


@dataclass(slots=True)
class Bench:
    """The tools of a loop, and its records; `clock` gives seconds since the start."""

    prepare: Prepare
    send: Send
    clock: Callable[[], float]
    meter: Meter
    records: list[RequestRecord] = field(default_factory=list)
    in_flight: int = 0


async def run_open(plan: Sequence[PlannedRequest], bench: Bench, *, max_in_flight: int) -> None:
    """Send every request at its time, then wait for the last answer."""
    async with asyncio.TaskGroup() as group:
        for planned in plan:
            assert planned.at_s is not None, "an open loop needs send times"
            # Make the body before the wait, so that its cost does not delay the send.
            body = bench.prepare(planned)
            await asyncio.sleep(max(0.0, planned.at_s - bench.clock()))
            if bench.in_flight >= max_in_flight:
                bench.meter.dropped()
                bench.records.append(never_sent(planned, bench.clock(), bench.in_flight))
                continue
            bench.in_flight += 1
            group.create_task(_fly(planned, body, bench))


async def run_closed(plan: Sequence[PlannedRequest], bench: Bench, *, concurrency: int) -> None:
    """Keep `concurrency` requests in flight until all have been answered."""
    waiting = iter(plan)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(plan))):
            group.create_task(_fly_in_turn(waiting, bench))


async def _fly_in_turn(waiting: Iterable[PlannedRequest], bench: Bench) -> None:
    for planned in waiting:
        bench.in_flight += 1
        await _fly(planned, bench.prepare(planned), bench)


async def _fly(planned: PlannedRequest, body: bytes, bench: Bench) -> None:
    """Send one request; also record it if the run is cancelled meanwhile."""
    started_s = bench.clock()
    bench.meter.sent()
    try:
        record = await bench.send(planned, body)
    except asyncio.CancelledError:
        bench.records.append(cancelled(planned, started_s, bench.clock()))
        raise
    finally:
        bench.in_flight -= 1
    bench.records.append(record)
    bench.meter.finished(failed=not record.ok)

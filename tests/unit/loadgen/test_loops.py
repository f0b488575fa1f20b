"""Pacing: an open loop never waits for answers, a closed loop keeps its number in flight."""

import asyncio
import time
from collections.abc import Callable

import pytest

from loadgen.client.loops import Bench, run_closed, run_open
from loadgen.client.meter import Meter
from loadgen.report.records import FailureKind, RequestRecord, lag_ms
from loadgen.workload.plan import PlannedRequest

MakePlanned = Callable[..., PlannedRequest]
MakeRecord = Callable[..., RequestRecord]
# How late a send may be on a busy two-core machine; one that waited for answers takes 500 ms.
LATE_MS = 250.0
ROUNDS = 8
"""A busy machine may be late in some rounds; a loop that waits for answers is late in each."""


class SlowServer:
    """Answers after `answer_s`, and remembers when requests came and how many at once."""

    def __init__(self, make_record: MakeRecord, answer_s: float) -> None:
        self._make_record = make_record
        self._answer_s = answer_s
        self._start_s = time.monotonic()
        self.came: list[int] = []
        self.in_flight = 0
        self.most_in_flight = 0

    def clock(self) -> float:
        return time.monotonic() - self._start_s

    async def send(self, planned: PlannedRequest, body: bytes) -> RequestRecord:
        sent_s = self.clock()
        self.came.append(planned.index)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self._answer_s)
        self.in_flight -= 1
        return self._make_record(planned, sent_s=sent_s, chunk_times_s=(self.clock(),))


def bench_on(server: SlowServer, planned: int) -> Bench:
    return Bench(lambda _: b"{}", server.send, server.clock, Meter(planned))


async def test_an_open_loop_sends_on_time_while_no_answer_has_come(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    rounds = []
    for _ in range(ROUNDS):
        server = SlowServer(make_record, answer_s=0.5)
        bench = bench_on(server, 20)
        plan = [make_planned(index, at_s=index * 0.01) for index in range(20)]
        await run_open(plan, bench, max_in_flight=100)
        lags = [lag for record in bench.records if (lag := lag_ms(record)) is not None]
        assert len(lags) == 20
        assert min(lags) > -2
        rounds.append((max(lags), server.most_in_flight))
        if max(lags) < LATE_MS:
            break
    assert min(rounds)[0] < LATE_MS
    assert max(most for _, most in rounds) == 20


async def test_an_open_loop_drops_and_records_what_goes_over_its_limit(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    server = SlowServer(make_record, answer_s=1.0)
    bench = bench_on(server, 10)
    plan = [make_planned(index, at_s=0.0) for index in range(10)]
    await run_open(plan, bench, max_in_flight=4)
    dropped = [record for record in bench.records if record.sent_s is None]
    assert server.most_in_flight == 4
    assert len(bench.records) == 10
    assert {record.failure.kind for record in dropped if record.failure} == {
        FailureKind.DROPPED_BY_CLIENT
    }
    snapshot = bench.meter.snapshot(server.clock())
    assert (snapshot.sent, snapshot.dropped, snapshot.done) == (4, 6, 4)


async def test_a_closed_loop_keeps_its_concurrency_and_the_order(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    server = SlowServer(make_record, answer_s=0.01)
    bench = bench_on(server, 20)
    plan = [make_planned(index, at_s=None) for index in range(20)]
    await run_closed(plan, bench, concurrency=4)
    assert server.most_in_flight == 4
    assert server.came == list(range(20))
    assert len(bench.records) == 20


@pytest.mark.parametrize("closed", [True, False])
async def test_a_stopped_run_keeps_a_record_of_every_request_it_sent(
    make_planned: MakePlanned, make_record: MakeRecord, closed: bool
) -> None:
    server = SlowServer(make_record, answer_s=30)
    bench = bench_on(server, 50)
    plan = [make_planned(index, at_s=index * 0.01) for index in range(50)]
    loop = (
        run_closed(plan, bench, concurrency=5)
        if closed
        else run_open(plan, bench, max_in_flight=99)
    )
    running = asyncio.create_task(loop)
    async with asyncio.timeout(30):
        while len(server.came) <= 3:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(bench.records) == len(server.came) > 3
    assert all(
        record.failure and record.failure.kind is FailureKind.CANCELLED for record in bench.records
    )


async def test_a_bug_in_sending_is_not_swallowed(make_planned: MakePlanned) -> None:
    async def broken(planned: PlannedRequest, body: bytes) -> RequestRecord:
        raise ZeroDivisionError

    bench = Bench(lambda _: b"", broken, time.monotonic, Meter(1))
    with pytest.raises(ExceptionGroup) as caught:
        await run_closed([make_planned(at_s=None)], bench, concurrency=1)
    assert caught.value.subgroup(ZeroDivisionError) is not None

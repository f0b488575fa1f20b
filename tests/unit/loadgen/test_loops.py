"""Pacing: an open loop never waits for answers, a closed loop keeps its number in flight."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from loadgen.client.loops import Bench, run_closed, run_open
from loadgen.client.meter import Meter
from loadgen.report.records import FailureKind, RequestRecord, lag_ms
from loadgen.workload.plan import PlannedRequest
from loadgen.workload.prompts import Exchange, History

Plan = list[PlannedRequest]
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
        self.bodies: list[bytes] = []
        self.fails_at: int | None = None
        self.in_flight = 0
        self.most_in_flight = 0

    def clock(self) -> float:
        return time.monotonic() - self._start_s

    async def send(self, planned: PlannedRequest, body: bytes) -> RequestRecord:
        sent_s = self.clock()
        self.came.append(planned.index)
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self._answer_s)
        self.in_flight -= 1
        failure = FailureKind.IN_BAND_ERROR if planned.index == self.fails_at else None
        record = self._make_record(
            planned, sent_s=sent_s, chunk_times_s=(self.clock(),), failure=failure, usage=7
        )
        return replace(record, answer=replace(record.answer, text=f"answer {planned.index}"))


def bench_on(server: SlowServer, planned: int) -> Bench:
    return Bench(named, remembered, server.send, server.clock, Meter(planned))


def named(planned: PlannedRequest, history: History) -> bytes:
    """A body that says which answers came before."""
    return ",".join(each.answer for each in history).encode()


def remembered(planned: PlannedRequest, answer: str) -> Exchange:
    return Exchange(planned, "asked", answer)


def session(make_planned: MakePlanned, turns: int, name: str = "s", index: int = 0) -> Plan:
    """A session that arrives at once and thinks for 50 ms before each later turn."""
    return [
        replace(
            make_planned(index + turn, at_s=None if turn else 0.0),
            session=name,
            turn=turn,
            think_s=0.05 if turn else 0.0,
        )
        for turn in range(turns)
    ]


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

    bench = Bench(named, remembered, broken, time.monotonic, Meter(1))
    with pytest.raises(ExceptionGroup) as caught:
        await run_closed([make_planned(at_s=None)], bench, concurrency=1)
    assert caught.value.subgroup(ZeroDivisionError) is not None


async def test_a_turn_waits_for_the_answer_and_brings_it_along(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    server = SlowServer(make_record, answer_s=0.02)
    bench = bench_on(server, 6)
    plan = session(make_planned, 3, "a") + session(make_planned, 3, "b", index=3)
    await run_open(plan, bench, max_in_flight=10)
    assert sorted(server.came) == list(range(6))
    assert server.most_in_flight == 2  # sessions run beside one another, their turns do not
    bodies = dict(zip(server.came, server.bodies, strict=True))
    assert [bodies[turn] for turn in range(3)] == [b"", b"answer 0", b"answer 0,answer 1"]
    records = {record.planned.index: record for record in bench.records}
    for earlier, later in pairwise(range(3)):
        due_s = records[earlier].ended_s + 0.05
        assert records[later].planned.at_s == pytest.approx(due_s)
        assert (records[later].sent_s or 0.0) >= due_s - 0.002
        grown = records[later].planned.history_tokens - records[earlier].planned.history_tokens
        assert grown == 10 + 7  # its own part, and the tokens that the server counted
    assert all(record.answer.text is None for record in bench.records)


async def test_a_turn_without_an_answer_ends_its_session_alone(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    server = SlowServer(make_record, answer_s=0.01)
    server.fails_at = 1
    bench = bench_on(server, 6)
    plan = session(make_planned, 3, "a") + session(make_planned, 3, "b", index=3)
    await run_open(plan, bench, max_in_flight=10)
    assert sorted(record.planned.index for record in bench.records) == [0, 1, 3, 4, 5]


async def test_a_turn_above_the_limit_is_dropped_and_ends_its_session(
    make_planned: MakePlanned, make_record: MakeRecord
) -> None:
    server = SlowServer(make_record, answer_s=0.01)
    bench = bench_on(server, 3)

    def fills_up(planned: PlannedRequest, answer: str) -> Exchange:
        bench.in_flight = 1
        return remembered(planned, answer)

    bench.remember = fills_up
    await run_open(session(make_planned, 3), bench, max_in_flight=1)
    assert server.came == [0]
    dropped = {record.planned.index: record.failure for record in bench.records}
    assert dropped.keys() == {0, 1}
    assert dropped[0] is None
    assert dropped[1]
    assert dropped[1].kind is FailureKind.DROPPED_BY_CLIENT

"""The two ways to pace requests: an open loop follows its send times, a closed loop the answers.

In an open loop a send never waits for an answer, except inside a session: its next turn is due some
time after the answer before it, and a turn without a whole answer ends it. Requests above
`max_in_flight` are dropped and recorded. Every request that a loop begins ends as exactly one
record, even if the run is cancelled. `send` is a parameter: loops know nothing of HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from loadgen.client.meter import Meter
from loadgen.report.records import RequestRecord, cancelled, never_sent, output_tokens
from loadgen.workload.plan import PlannedRequest
from loadgen.workload.prompts import Exchange, History

Prepare = Callable[[PlannedRequest, History], bytes]
Remember = Callable[[PlannedRequest, str], Exchange]
Send = Callable[[PlannedRequest, bytes], Awaitable[RequestRecord]]


@dataclass(slots=True)
class Bench:
    """The tools of a loop, and its records; `clock` gives seconds since the start.

    `prepare` makes a request's body, `remember` a turn and its answer for the next turn's history.
    """

    prepare: Prepare
    remember: Remember
    send: Send
    clock: Callable[[], float]
    meter: Meter
    records: list[RequestRecord] = field(default_factory=list)
    in_flight: int = 0


async def run_open(plan: Sequence[PlannedRequest], bench: Bench, *, max_in_flight: int) -> None:
    """Send every request or session at its time, then wait for the last answer."""
    async with asyncio.TaskGroup() as group:
        for turns in _sessions(plan):
            first, *later = turns
            assert first.at_s is not None, "an open loop needs send times"
            # Make the body before the wait, so that its cost does not delay the send.
            body = bench.prepare(first, ())
            await asyncio.sleep(max(0.0, first.at_s - bench.clock()))
            if not _has_room(first, bench, max_in_flight):
                continue
            bench.in_flight += 1
            group.create_task(_converse(first, body, later, bench, max_in_flight))


async def run_closed(plan: Sequence[PlannedRequest], bench: Bench, *, concurrency: int) -> None:
    """Keep `concurrency` requests in flight until all have been answered."""
    waiting = iter(plan)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(plan))):
            group.create_task(_fly_in_turn(waiting, bench))


async def _fly_in_turn(waiting: Iterable[PlannedRequest], bench: Bench) -> None:
    for planned in waiting:
        bench.in_flight += 1
        await _fly(planned, bench.prepare(planned, ()), bench)


def _sessions(plan: Sequence[PlannedRequest]) -> Iterable[list[PlannedRequest]]:
    """Yield the turns of each session together, and every other request alone."""
    for _, turns in groupby(plan, lambda planned: planned.session or planned.index):
        yield list(turns)


def _has_room(planned: PlannedRequest, bench: Bench, max_in_flight: int) -> bool:
    """Return whether one more may fly; if not, record that this one is dropped."""
    if bench.in_flight < max_in_flight:
        return True
    bench.meter.dropped()
    bench.records.append(never_sent(planned, bench.clock(), bench.in_flight))
    return False


async def _converse(
    first: PlannedRequest,
    body: bytes,
    later: Sequence[PlannedRequest],
    bench: Bench,
    max_in_flight: int,
) -> None:
    """Send a request, and the later turns of its session each after the answer before it."""
    history: History = ()
    record = await _fly(first, body, bench)
    for turn in later:
        if not record.ok:
            return
        history = (*history, bench.remember(record.planned, record.answer.text or ""))
        planned = _due_after(record, turn)
        assert planned.at_s is not None
        body = bench.prepare(planned, history)
        await asyncio.sleep(max(0.0, planned.at_s - bench.clock()))
        if not _has_room(planned, bench, max_in_flight):
            return
        bench.in_flight += 1
        record = await _fly(planned, body, bench)


def _due_after(record: RequestRecord, turn: PlannedRequest) -> PlannedRequest:
    """Return the turn with its send time, and the length that its history really has."""
    before = record.planned
    return replace(
        turn,
        at_s=record.ended_s + turn.think_s,
        history_tokens=before.history_tokens + before.prompt_tokens + output_tokens(record),
    )


async def _fly(planned: PlannedRequest, body: bytes, bench: Bench) -> RequestRecord:
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
    # Texts are for the next turn alone: those of a long run would fill the memory.
    bench.records.append(replace(record, answer=replace(record.answer, text=None)))
    bench.meter.finished(failed=not record.ok)
    return record

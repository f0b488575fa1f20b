"""The session with a coordinator that refuses, leaves, comes back and does not read."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    GatewayDown,
    GatewayHello,
    GatewayUp,
    TaskFailed,
)
from coordinator.protocol.terms import TaskId
from gateway.relay import session as session_module
from gateway.relay.session import CoordinatorSession
from tests.harness.cells.gateway_cell import SERVING, TOKEN, FakeCell


class Log:
    """A listener that notes what happens."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0
        self.said: list[GatewayDown] = []
        self.first: list[GatewayUp] = []

    def session_opened(self) -> list[GatewayUp]:
        self.opened += 1
        return self.first

    def session_closed(self) -> None:
        self.closed += 1

    def on_coordinator_message(self, message: GatewayDown) -> None:
        self.said.append(message)


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
async def session(cell: FakeCell, log: Log) -> AsyncIterator[CoordinatorSession]:
    session = CoordinatorSession(f"127.0.0.1:{cell.port}", TOKEN, "gateway-1")
    work = asyncio.create_task(session.run(log))
    yield session
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_hello_then_what_is_open_then_the_rest(
    cell: FakeCell, session: CoordinatorSession, log: Log
) -> None:
    log.first = [Cancel(TaskId("a")), Cancel(TaskId("b"))]
    await cell.until(lambda: session.up)
    session.send(Cancel(TaskId("c")))
    await cell.until(lambda: len(cell.seen) == 4)
    assert isinstance(cell.seen[0], GatewayHello)
    assert [each.task for each in cell.of(Cancel)] == ["a", "b", "c"]
    await cell.until(lambda: log.said)
    assert log.said == [SERVING]


async def test_messages_arrive(cell: FakeCell, session: CoordinatorSession, log: Log) -> None:
    await cell.until(lambda: log.said)
    failed, state = TaskFailed(TaskId("a"), "x", "y"), CellState("tp2", 2, True, 2, 2, 0, 9)
    cell.say(failed)
    cell.say(state)
    await cell.until(lambda: len(log.said) == 3)
    assert log.said[1:] == [failed, state]


async def test_broken_session_is_opened_again(
    cell: FakeCell, session: CoordinatorSession, log: Log
) -> None:
    await cell.until(lambda: session.up)
    cell.go_away()
    await cell.until(lambda: not session.up)
    session.send(Cancel(TaskId("lost")))
    assert (log.opened, log.closed) == (1, 1)
    cell.come_back()
    await cell.until(lambda: session.up)
    assert log.opened == 2
    assert cell.of(Cancel) == []


async def test_wrong_secret_opens_nothing(cell: FakeCell, log: Log) -> None:
    stranger = CoordinatorSession(f"127.0.0.1:{cell.port}", "not-the-secret", "gateway-2")
    work = asyncio.create_task(stranger.run(log))
    await asyncio.sleep(0.3)
    assert not stranger.up
    assert cell.seen == []
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_coordinator_that_does_not_greet_is_left(
    cell: FakeCell, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "WELCOME_WAIT_S", 0.1)
    cell.mute = True
    session = CoordinatorSession(f"127.0.0.1:{cell.port}", TOKEN, "gateway-1")
    work = asyncio.create_task(session.run(log))
    await cell.until(lambda: len(cell.of(GatewayHello)) >= 2)
    assert (log.opened, log.closed) == (0, 0)
    cell.mute = False
    await cell.until(lambda: session.up)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_full_outbox_ends_the_session_and_the_next_one_starts_anew(
    cell: FakeCell, session: CoordinatorSession, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cell.until(lambda: session.up)
    monkeypatch.setattr(session_module, "OUTBOX_MESSAGES_MAX", 10)
    for number in range(12):
        session.send(Cancel(TaskId(str(number))))
    await cell.until(lambda: log.opened == 2)
    assert session.up


async def test_flush_returns_when_all_was_sent(cell: FakeCell, session: CoordinatorSession) -> None:
    await session.flush()
    await cell.until(lambda: session.up)
    for number in range(100):
        session.send(Cancel(TaskId(str(number))))
    await asyncio.wait_for(session.flush(), 5)
    await cell.until(lambda: len(cell.of(Cancel)) == 100)

"""Streams over cells that die, drain, lose their sessions and come back: every token exactly once.

A gateway's own book, roster and token streams, and the task pool of each cell, with messages that
are late and lost with their sessions, and tokens in any order. A token here is made from all tokens
before it, so one of another continuation than the client's is seen at once.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from coordinator.model.events import Effect, ToGateway, ToRank
from coordinator.model.settings import PoolLimits, QueueBounds
from coordinator.protocol.messages.gateway import (
    Cancel,
    CellLoad,
    CellState,
    Done,
    GatewayUp,
    Resubmit,
    Submit,
    TaskFailed,
    Withdraw,
    Withdrawn,
)
from coordinator.protocol.messages.rank import Drop, GiveBack, Place, TokenSpan
from coordinator.protocol.messages.tasks import TaskEnded, TaskHeader
from coordinator.protocol.terms import EndCause, TaskId, Tier
from coordinator.tasks.task_pool import TaskPool
from gateway.fleet.rebalancer import Rebalancer, needs_of
from gateway.fleet.roster import CellRoster
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.token_stream import Trim, Verdict
from tests.harness.coordinator.pools import ZERO, group, returned

NAMES = ("a", "b", "c")
LENGTH = 6
DEAD_AFTER_S = 20
STEPS = 400
LIMITS = PoolLimits(queue=QueueBounds(100), ageing_ms=1_000, pause_limit_ms=100, claim_ms=5_000)
STATE = CellState("dp1", 1, serving=True, world=1, ranks_alive=1, queued=0, max_context_tokens=160)


@dataclass(frozen=True)
class Token:
    """What comes behind which tokens."""

    behind: tuple[int, ...]
    id: int


@dataclass
class Cell:
    """A coordinator's task pool, and a leader that makes tokens."""

    pool: TaskPool = field(default_factory=lambda: TaskPool(LIMITS))
    running: dict[TaskId, tuple[int, list[int]]] = field(default_factory=dict)
    up: deque[GatewayUp] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    is_open: bool = False
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.pool.context_tokens_max = 160
        self.pool.recovered(0)

    def perform(self, effects: list[Effect], now_ms: int = 0) -> None:
        for effect in effects:
            if isinstance(effect, ToGateway) and self.is_open:
                self.down.append(effect.message)
            elif isinstance(effect, ToRank):
                self.perform_at_rank(effect.message, now_ms)

    def perform_at_rank(self, message: Any, now_ms: int) -> None:
        if isinstance(message, GiveBack):
            attempt, tokens = self.running.pop(message.task)
            self.pool.returned(ZERO, returned(message.task, attempt, *tokens), now_ms)
            return
        task = message.task if isinstance(message, Drop) else message.header.task
        if isinstance(message, Place):
            self.running[task] = (message.attempt, list(message.generated_tokens))
        elif self.running.get(task, (message.attempt + 1, []))[0] <= message.attempt:
            del self.running[task]


class World:
    """One gateway and three cells."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cells = {name: Cell() for name in NAMES}
        self.book = OpenRequests()
        self.roster = CellRoster(NAMES, DEAD_AFTER_S, in_fleet=True)
        self.spread = Rebalancer(self.book, self.roster)
        self.spans: list[tuple[TokenSpan, Token | None]] = []
        self.streams: dict[TaskId, list[int]] = {}
        self.finished: set[TaskId] = set()
        self.now_s = 0
        self.ids = 0

    def step(self) -> None:
        name = self.rng.choice(NAMES)
        does: list[tuple[int, Any]] = [
            (3, self.add),
            (30, lambda: self.take(name)),
            (30, lambda: self.compute(name)),
            (30, self.deliver),
            (20, lambda: self.hear(name)),
            (3, lambda: self.break_session(name)),
            (6, lambda: self.open_session(name)),
            (2, lambda: self.drain(name)),
            (1, lambda: self.kill(name)),
            (10, self.tick),
        ]
        self.rng.choices([do for _, do in does], [weight for weight, _ in does])[0]()

    def add(self) -> None:
        task = TaskId(f"task-{len(self.streams)}")
        self.streams[task] = []
        header = TaskHeader(task, "g", "tcp://g", 3, LENGTH, self.rng.choice(list(Tier)))
        cell = self.roster.choose(needs_of(header), ())
        submit = self.book.open(header, b"", self.now_s, cell=cell)
        if isinstance(submit, Submit) and cell is not None:
            self.send([(cell, submit)])

    def send(self, told: list[tuple[str, GatewayUp]]) -> None:
        for name, message in told:
            if self.cells[name].is_open:
                self.cells[name].up.append(message)

    def take(self, name: str) -> None:
        """A coordinator reads its gateway's next message, and places what it can."""
        cell = self.cells[name]
        if cell.up:
            match cell.up.popleft():
                case Submit() as submit:
                    cell.perform(cell.pool.submit(submit, self.now_ms))
                case Cancel(task):
                    cell.perform(cell.pool.release(task))
                case Done(task):
                    cell.perform(cell.pool.release(task, is_done=True))
                case Withdraw(task):
                    cell.perform(cell.pool.withdraw(task))
        cell.perform(cell.pool.place([group(blocks=100)], self.now_ms), self.now_ms)
        cell.pool.integrity()

    def compute(self, name: str) -> None:
        """A leader makes a token of one task."""
        cell = self.cells[name]
        if not cell.running:
            return
        task = self.rng.choice(sorted(cell.running))
        attempt, tokens = cell.running[task]
        first, token = len(tokens), None
        if first < LENGTH:
            self.ids += 1
            token = Token(tuple(tokens), self.ids)
            tokens.append(token.id)
        is_end = len(tokens) >= LENGTH
        span = TokenSpan(task, attempt, first, int(token is not None), is_end)
        self.spans.append((span, token))
        if is_end:
            del cell.running[task]
            ended = TaskEnded(task, attempt, EndCause.FINISHED, LENGTH)
            cell.perform(cell.pool.ended(ZERO, ended))

    def deliver(self) -> None:
        """Any of the spans under way arrives."""
        if not self.spans:
            return
        span, token = self.spans.pop(self.rng.randrange(min(len(self.spans), 4)))
        task = self.book.get(span.task)
        if task is None:
            return
        answer = task.stream.offer(span)
        if answer is Verdict.HOLD:
            assert task.stream.hold(span, (span, token))
        elif answer is not Verdict.DROP:
            self.hand_on(task, span, token, answer)
        for ready, (held, held_token) in task.stream.ready():
            self.hand_on(task, held, held_token, ready)
        if task.stream.ended:
            self.finished.add(task.id)
            self.send([(task.cell or "", self.book.finish(task.id))])

    def hand_on(
        self, task: OpenRequest, span: TokenSpan, token: Token | None, answer: Verdict | Trim
    ) -> None:
        keep = answer.keep if isinstance(answer, Trim) else span.count
        if not keep:
            return
        assert token is not None
        assert token.behind == tuple(task.delivered), "a token of another continuation"
        task.delivered.append(token.id)
        self.streams[task.id].append(token.id)

    def hear(self, name: str) -> None:
        """The gateway reads a coordinator's next message, and hears how busy it is."""
        cell = self.cells[name]
        if cell.is_open:
            queued = tuple(cell.pool.tasks.queue.count(tier) for tier in Tier)
            load = CellLoad(queued, len(cell.running), 4, 100, 100)
            state = msgspec.structs.replace(STATE, draining=cell.is_draining, load=load)
            if self.roster.update(name, state):
                self.send(self.spread.cell_changed(self.now_s))
        if not cell.down:
            return
        match cell.down.popleft():
            case TaskFailed(task, code):
                assert self.spread.refused(task, code, name) or self.book.get(task) is None
            case Resubmit(task, attempt):
                self.send([(name, self.book.resubmit(task, attempt, name))])
            case Withdrawn(task):
                self.send(self.spread.withdrawn(task, name))

    def break_session(self, name: str) -> None:
        cell = self.cells[name]
        if cell.is_open:
            cell.is_open = False
            cell.up.clear()
            cell.down.clear()
            self.roster.closed(name, self.now_s)
            self.book.session_closed(name)

    def open_session(self, name: str) -> None:
        cell = self.cells[name]
        if not cell.is_open:
            cell.is_open = True
            self.roster.opened(name)
            cell.pool.gateway_opened("g", self.now_ms)
            self.send([(name, message) for message in self.book.session_opened(name)])

    def drain(self, name: str) -> None:
        self.cells[name].is_draining ^= True

    def kill(self, name: str) -> None:
        """Its host is lost; a new one takes its place."""
        self.break_session(name)
        self.cells[name] = Cell()

    def tick(self) -> None:
        self.now_s += 1
        self.send(self.spread.tick(self.now_s))
        for cell in self.cells.values():
            cell.perform(cell.pool.tick(self.now_ms))

    @property
    def now_ms(self) -> int:
        return self.now_s * 1_000

    def settle(self) -> None:
        """Everything works from now on: all that was begun must end."""
        for cell in self.cells.values():
            cell.is_draining = False
        for _ in range(3_000):
            for name in NAMES:
                self.open_session(name)
                self.hear(name)
                self.take(name)
                self.compute(name)
            self.deliver()
            self.tick()
            busy = any(cell.up or cell.running or cell.down for cell in self.cells.values())
            if not len(self.book) and not busy:
                return
        raise AssertionError(f"{len(self.book)} tasks never end")


@pytest.mark.parametrize("seed", range(60))
def test_every_stream_is_whole_whatever_becomes_of_its_cells(seed: int) -> None:
    world = World(seed)
    for name in NAMES:
        world.open_session(name)
    for _ in range(STEPS):
        world.step()
    world.settle()
    assert world.finished == set(world.streams)
    assert all(len(tokens) == LENGTH for tokens in world.streams.values())
    # Nobody computes for nothing.
    assert not any(len(cell.pool.tasks) for cell in world.cells.values())
    assert not any(cell.running for cell in world.cells.values())

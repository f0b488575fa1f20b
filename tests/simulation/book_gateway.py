"""A gateway around the real task book and the real token streams; its clients check every token."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.protocol.messages.gateway import (
    BatchesRun,
    CellState,
    GatewayDown,
    GatewayFiles,
    GatewayHello,
    GatewayToCore,
    Resubmit,
    TaskFailed,
    Welcome,
)
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import TokenSpan
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from gateway.errors import ApiError
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.token_stream import Answer, Trim, Verdict
from tests.harness.worker.fake_scheduler import fake_payload
from tests.simulation.checkers import Stream, check
from tests.simulation.network import Session
from tests.simulation.sim_gateway import EXPECTED_FAILURES, Token, prompt_of

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True)
class Asked:
    """A request: what the gateway knows of it, and what its client sees."""

    task: OpenRequest
    stream: Stream

    @property
    def fence(self) -> int:
        """Tokens of this attempt and lower ones are not taken."""
        return self.task.stream._fence


class BookGateway:
    """Submits tasks, cancels some, reconnects; its book and streams are what the relay uses."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.session: Session | None = None
        self.book = OpenRequests()
        self.open: dict[TaskId, Asked] = {}
        self.streams: list[Stream] = []
        self.serving = False
        self.clock_jump_s = 0.0
        self._count = 0

    @property
    def clock_s(self) -> float:
        return self.world.now_ms / 1_000 + self.clock_jump_s

    def submit(self, rng: random.Random, deadlines_ms: tuple[int, ...] = (0, 0, 0, 900)) -> None:
        """A client asks for something; every fifth asks for two choices."""
        self._count += 1
        names = [f"{self.name}-{self._count}"]
        if self._count % 5 == 0:
            names = [f"{choice}_{names[0]}" for choice in range(2)]
        prompt_tokens, tier = rng.randint(1, 14), rng.choice(tuple(Tier))
        deadline_ms = rng.choice(deadlines_ms)
        for name in names:
            most = self.world.max_tokens
            # The longer ones are more likely to be there when a switch comes.
            length = max(rng.randint(1, most), rng.randint(1, most))
            header = TaskHeader(
                task=TaskId(name),
                gateway=self.name,
                reply_to=self.name,
                prompt_tokens=prompt_tokens,
                max_tokens=most,
                tier=tier,
                deadline_ms=deadline_ms,
                tenant="other" if self._count % 4 == 0 else "one",
            )
            stream = Stream(header.task, length)
            self.streams.append(stream)
            answer = self.book.open(
                header, fake_payload(header.task, prompt_of(header), length), self.clock_s
            )
            assert not isinstance(answer, ApiError)
            task = self.book.get(header.task)
            assert task is not None
            self.open[header.task] = Asked(task, stream)
            if answer is not None:
                self._say(answer)

    def cancel_any(self, rng: random.Random) -> None:
        """A client goes away, with all its choices or with one of them."""
        if not self.open:
            return
        name = rng.choice(list(self.open))
        for _, cancel in self.book.cancel([name, name]):
            self._ended(name, "cancelled")
            self._say(cancel)

    def connected(self, session: Session) -> None:
        """Say hello, the ends that may have been lost, and everything that is still wanted."""
        self.session = session
        self._say(GatewayHello(PROTOCOL_VERSION, self.name))
        for message in self.book.session_opened():
            assert not isinstance(message, BatchesRun | GatewayFiles)
            self._say(message)

    def broken(self) -> None:
        """The session is gone."""
        self.book.session_closed()

    def on_message(self, message: GatewayDown) -> None:
        match message:
            case TaskFailed(task_id, code, _):
                check(code in EXPECTED_FAILURES, f"{task_id} failed: {code}")
                self._fail(task_id, code)
            case Resubmit(task_id, attempt):
                self._say(self.book.resubmit(task_id, attempt))
            case CellState():
                self.serving = message.serving
            case Welcome():
                pass

    def tick(self) -> None:
        """Give up what has waited too long, as the relay does on an interval."""
        for task_id, error in self.book.expired(self.clock_s):
            check(error.code in EXPECTED_FAILURES, f"{task_id} is given up: {error.code}")
            self._fail(task_id, error.code)

    def on_tokens(self, tokens: tuple[Token, ...]) -> None:
        for token in tokens:
            check(token.token >= 0, f"{token.task}: a token of a step that never ended")
            self._on_token(token)

    def _on_token(self, token: Token) -> None:
        task = self.book.get(token.task)
        if task is None:
            if (cancel := self.book.stray(token.task)) is not None:
                self._say(cancel)
            return
        span = TokenSpan(token.task, token.attempt, token.index, 1, token.is_last)
        answer = task.stream.offer(span)
        if answer is Verdict.HOLD:
            self.world.stats.held_tokens += 1
            if task.held_since_s is None:
                task.held_since_s = self.clock_s
            check(task.stream.hold(span, token), f"{task.id} holds too many tokens")
        elif answer is not Verdict.DROP:
            self._take(task, answer, token)
        for ready, held in task.stream.ready():
            self._take(task, ready, held)
        if not task.stream.holding:
            task.held_since_s = None
        if task.stream.ended:
            self._ended(task.id, "finished")
            self._say(self.book.finish(task.id))

    def _take(self, task: OpenRequest, answer: Answer, token: Token) -> None:
        """Hand on what the answer leaves of a token: all of it, or only that it is the last."""
        client = self.open[task.id].stream
        if isinstance(answer, Trim):
            self.world.stats.trimmed_tokens += 1
        if not isinstance(answer, Trim) or answer.keep:
            client.deliver(token.index, token.before, token.token)
            task.delivered.append(token.token)
        check(
            len(task.delivered) == task.stream.expected,
            f"{task.id} has {len(task.delivered)} tokens, counted are {task.stream.expected}",
        )

    def _fail(self, task_id: TaskId, code: str) -> None:
        failed, cancels = self.book.fail(task_id)
        for each in failed:
            self._ended(each, code)
        for _, cancel in cancels:
            self._say(cancel)

    def _ended(self, task_id: TaskId, how: str) -> None:
        self.open.pop(task_id).stream.finish(how)

    def _say(self, message: GatewayToCore) -> None:
        if self.session is not None and self.session.is_open:
            self.world.to_core(self.session, self.name, message)

"""A gateway whose clients check every token."""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    Done,
    GatewayDown,
    GatewayHello,
    GatewayToCore,
    Resubmit,
    Submit,
    TaskFailed,
    Welcome,
)
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from tests.harness.worker.fake_scheduler import fake_payload
from tests.simulation.checkers import Stream, check
from tests.simulation.network import Session

if TYPE_CHECKING:
    from tests.simulation.world import World

EXPECTED_FAILURES = frozenset(
    {
        *("queue_full", "tier_capacity", "no_healthy_workers"),
        *("deadline_exceeded", "context_length_exceeded", "worker_lost"),
    }
)


@dataclass(frozen=True)
class Token:
    """One token as a leader pushes it; `before` is the digest of all tokens before it."""

    task: TaskId
    attempt: int
    index: int
    before: int
    token: int
    is_last: bool


@dataclass
class ClientTask:
    """A request as its gateway knows it."""

    header: TaskHeader
    payload: bytes
    stream: Stream
    fence: int = 0
    """Tokens of this attempt and lower ones are not taken."""
    seen: int = 0
    """The highest attempt that counts: its tokens came, or it may have been made."""
    held: dict[int, Token] = field(default_factory=dict)


def prompt_of(header: TaskHeader) -> list[int]:
    """Return the prompt of a request."""
    return list(range(header.prompt_tokens))


class SimGateway:
    """Submits tasks, cancels some, reconnects, and never trusts what it is sent."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.session: Session | None = None
        self.open: dict[TaskId, ClientTask] = {}
        self.streams: list[Stream] = []
        self.ended: dict[TaskId, Cancel | Done] = {}
        self.serving = False
        self._count = 0

    def submit(self, rng: random.Random, deadlines_ms: tuple[int, ...] = (0, 0, 0, 900)) -> None:
        """A client asks for something."""
        self._count += 1
        # The longer ones are more likely to be there when a switch comes.
        length = max(rng.randint(1, self.world.max_tokens), rng.randint(1, self.world.max_tokens))
        header = TaskHeader(
            task=TaskId(f"{self.name}-{self._count}"),
            gateway=self.name,
            reply_to=self.name,
            prompt_tokens=rng.randint(1, 14),
            max_tokens=self.world.max_tokens,
            tier=rng.choice(tuple(Tier)),
            deadline_ms=rng.choice(deadlines_ms),
            tenant="other" if self._count % 4 == 0 else "one",
        )
        stream = Stream(header.task, length)
        self.streams.append(stream)
        task = ClientTask(header, fake_payload(header.task, prompt_of(header), length), stream)
        self.open[header.task] = task
        self._say(self._submission(task))

    def cancel_any(self, rng: random.Random) -> None:
        """A client goes away."""
        if self.open:
            task = rng.choice(list(self.open.values()))
            self._end(task, "cancelled", Cancel(task.header.task))

    def connected(self, session: Session) -> None:
        """Say hello, the ends that may have been lost, and everything that is still wanted."""
        self.session = session
        self.world.to_core(session, self.name, GatewayHello(PROTOCOL_VERSION, self.name))
        for end in self.ended.values():
            self._say(end)
        for task in self.open.values():
            self._say(self._submission(task))

    def broken(self) -> None:
        """The session is gone; the next one is told all that is open."""

    def tick(self) -> None:
        """Nothing waits for the clock."""

    def on_message(self, message: GatewayDown) -> None:
        match message:
            case TaskFailed(task_id, code, _):
                check(code in EXPECTED_FAILURES, f"{task_id} failed: {code}")
                if task := self.open.get(task_id):
                    self._end(task, code, Cancel(task_id))
            case Resubmit(task_id, attempt):
                task = self.open.get(task_id)
                if task is None:
                    self._say(self.ended.get(task_id, Cancel(task_id)))
                    return
                task.fence = max(task.fence, attempt)
                task.held.clear()
                self._say(self._submission(task))
            case CellState():
                self.serving = message.serving
            case Welcome():
                pass

    def on_tokens(self, tokens: tuple[Token, ...]) -> None:
        for token in tokens:
            check(token.token >= 0, f"{token.task}: a token of a step that never ended")
            self._on_token(token)

    def _on_token(self, token: Token) -> None:
        task = self.open.get(token.task)
        if task is None:
            self._say(self.ended.get(token.task, Cancel(token.task)))
            return
        if not self.takes(task, token) or token.index < len(task.stream.tokens):
            return
        task.seen = max(task.seen, token.attempt)
        task.held[token.index] = token
        while (ready := task.held.pop(len(task.stream.tokens), None)) is not None:
            task.stream.deliver(ready.index, ready.before, ready.token)
            if ready.is_last:
                self._end(task, "finished", Done(task.header.task))
                return

    def takes(self, task: ClientTask, token: Token) -> bool:
        return token.attempt > task.fence

    def _submission(self, task: ClientTask) -> Submit:
        attempt = max(task.seen, task.fence)
        tokens = tuple(task.stream.tokens)
        return Submit(task.header, task.payload, tokens, attempt, void_attempt=task.fence)

    def _end(self, task: ClientTask, how: str, message: Cancel | Done) -> None:
        task.stream.finish(how)
        del self.open[task.header.task]
        self.ended[task.header.task] = message
        self._say(message)

    def _say(self, message: GatewayToCore) -> None:
        if self.session is not None and self.session.is_open:
            self.world.to_core(self.session, self.name, message)
            if isinstance(message, Submit) and (task := self.open.get(message.header.task)):
                task.seen = max(task.seen, 1)

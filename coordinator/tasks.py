"""One task as the pool knows it, and the order in which queued tasks are taken.

Order: effective tier, then arrival. A task rises by one tier for each `ageing_ms` since it
arrived, so within its own tier arrival decides, and a task that was returned stands where it
stood before. Called by the task pool.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from comm_pool.layout import Rank
from coordinator.events import Effect, ToGateway, ToRank
from coordinator.protocol.messages import Drop, Resubmit, Submit, TaskHeader, TaskId, Tier


class State(Enum):
    """Where an unfinished task is; exactly one at a time."""

    QUEUED = "queued"
    """It waits in the pool for a group."""
    PLACED = "placed"
    """A leader runs it or has it waiting."""
    PAUSED = "paused"
    """Its leader holds its KV, but its group is not bound."""
    RETURNING = "returning"
    """Its leader was told to give it back."""
    ASKED = "asked"
    """Nobody here knows how far it got: its gateway is to submit it again."""


HELD = frozenset({State.PLACED, State.PAUSED, State.RETURNING})
"""The states in which a leader holds the task."""


@dataclass(slots=True)
class Task:
    """An unfinished task.

    `tokens` are those that the next attempt goes on behind, `generated` counts all that are known
    of. `attempt` is the number of the last placement; in ASKED it is one that is never placed, so
    that the gateway can tell tokens from before from those after.
    """

    header: TaskHeader
    arrival: int
    arrived_ms: int
    state: State
    since_ms: int
    """When it came into its state."""
    payload: bytes | None = None
    """None until the gateway of a task that ranks held all along has submitted it again."""
    tokens: tuple[int, ...] = ()
    generated: int = 0
    attempt: int = 0
    leader: Rank | None = None
    former: frozenset[Rank] = frozenset()
    """Leaders that gave it on, and whose last tokens may still be under way."""
    told: int = 0
    """The highest attempt of which the gateway took tokens, or takes none any more."""

    @property
    def id(self) -> TaskId:
        """The task's id."""
        return self.header.task

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV it needs for its next token."""
        return self.header.prompt_tokens + self.generated + 1

    @property
    def context_tokens_max(self) -> int:
        """Tokens whose KV it may need before it ends."""
        return self.header.prompt_tokens + self.header.max_tokens


def new_task(message: Submit, arrival: int, arrived_ms: int) -> Task:
    """Return the queued task of a gateway's submission."""
    return Task(
        header=message.header,
        arrival=arrival,
        arrived_ms=arrived_ms,
        state=State.QUEUED,
        since_ms=arrived_ms,
        payload=message.payload,
        tokens=message.delivered_tokens,
        generated=len(message.delivered_tokens),
        attempt=message.attempt,
        told=message.attempt,
    )


def too_long(task: Task, limit: int) -> str | None:
    """Return why a task is too long for contexts of `limit` tokens; a limit of 0 is unknown."""
    if not limit or task.context_tokens_max <= limit:
        return None
    return (
        f"the largest context here is {limit} tokens, but the request asks for "
        f"{task.context_tokens_max}: {task.header.prompt_tokens} in the prompt and up to "
        f"{task.header.max_tokens} to generate."
    )


def dropped(task: Task) -> list[Effect]:
    """Tell the task's leader, if it has one, to forget it."""
    return [] if task.leader is None else [ToRank(task.leader, Drop(task.id, task.attempt))]


def ask(task: Task) -> Effect:
    """Ask the task's gateway to submit it again, and to take no token of this attempt."""
    return ToGateway(task.header.gateway, Resubmit(task.id, task.attempt))


class TaskQueue:
    """The queued tasks, by tier and arrival.

    Putting and removing costs a binary search and moving pointers; taking the next task O(1).
    """

    __slots__ = ("_ageing_ms", "_lines")

    def __init__(self, ageing_ms: int) -> None:
        self._ageing_ms = ageing_ms
        self._lines: dict[Tier, list[tuple[int, int, TaskId]]] = {tier: [] for tier in Tier}

    def __len__(self) -> int:
        """Return the number of queued tasks."""
        return sum(map(len, self._lines.values()))

    def put(self, task: Task) -> None:
        """Queue a task at the place of its arrival."""
        insort(self._lines[task.header.tier], _entry(task))

    def remove(self, task: Task) -> None:
        """Take a queued task out."""
        line = self._lines[task.header.tier]
        index = bisect_left(line, _entry(task))
        assert index < len(line) and line[index][2] == task.id, f"task {task.id} is not queued."
        del line[index]

    def in_order(self, now_ms: int, closed: Collection[Tier]) -> Iterator[TaskId]:
        """Yield the tasks as they are to be taken; the queue must not change meanwhile.

        A tier that the caller adds to `closed` on the way ends early.
        """
        lines = [self._aged(tier, now_ms, closed) for tier in Tier]
        return (task for _, _, task in heapq.merge(*lines))

    def _aged(
        self, tier: Tier, now_ms: int, closed: Collection[Tier]
    ) -> Iterator[tuple[int, int, TaskId]]:
        for arrival, arrived_ms, task in self._lines[tier]:
            if tier in closed:
                return
            lifted = tier - (now_ms - arrived_ms) // self._ageing_ms
            yield max(lifted, Tier.INTERACTIVE), arrival, task


def _entry(task: Task) -> tuple[int, int, TaskId]:
    return task.arrival, task.arrived_ms, task.id

"""Tasks in messages: the header, and the state of tasks in reports and hellos.

Plain values without a tag of their own on the wire.
"""

import msgspec

from comm_pool.layout import Group
from coordinator.protocol.terms import EndCause, ReturnCause, TaskId, Tier


class TaskHeader(msgspec.Struct, frozen=True):
    """The coordinator's view of a request; the payload stays opaque to it.

    `reply_to` is the ZeroMQ address that leaders push tokens to. `deadline_ms` counts from the
    task's arrival at the coordinator; 0 means none. `tenant` is charged for the task's share of its
    tier. `trace` is the parent `traceparent` of the task's spans; empty if it is not traced.
    """

    task: TaskId
    gateway: str
    reply_to: str
    prompt_tokens: int
    max_tokens: int
    tier: Tier = Tier.STANDARD
    deadline_ms: int = 0
    tenant: str = ""
    trace: str = ""


class HeldTask(msgspec.Struct, frozen=True):
    """A task that a leader holds when its session opens.

    `moves`: the leader waits for the outcome of a migration, which may give the task to another.
    """

    header: TaskHeader
    attempt: int
    group: Group
    generated: int
    paused: bool
    moves: bool = False


class TaskEnded(msgspec.Struct, frozen=True):
    """A task that its leader finished or dropped."""

    task: TaskId
    attempt: int
    cause: EndCause
    generated: int


class TaskReturned(msgspec.Struct, frozen=True):
    """A task handed back, with every token generated so far (over all attempts)."""

    task: TaskId
    attempt: int
    cause: ReturnCause
    generated_tokens: tuple[int, ...]


class TaskProgress(msgspec.Struct, frozen=True):
    """How far a running task is, in generated tokens."""

    task: TaskId
    generated: int
    paused: bool


class Adopted(msgspec.Struct, frozen=True):
    """A task whose KV a leader adopts from another group, to continue it as `attempt`."""

    task: TaskId
    attempt: int
    generated: int

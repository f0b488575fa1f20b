"""Messages between a gateway and a coordinator, and the units that they count in. Pure."""

import msgspec

from coordinator.protocol.messages.message import Message
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId

ATTEMPTS_PER_CELL = 2**32
"""Attempts that one cell may make of a task. A cell that gets a task from another cell starts at
the next multiple, so tokens of an earlier cell always have lower attempts."""

PREFIXES_MAX = 4_096
"""Blocks of prompts that a cell and each of its gateways remember."""


def cells_before(attempt: int) -> int:
    """Return how many other cells had a task before the one that made this attempt."""
    return attempt // ATTEMPTS_PER_CELL


class GatewayHello(Message, frozen=True):
    """First message of a gateway's session; the gateway then resubmits all unfinished tasks."""

    version: int
    gateway: str


class Submit(Message, frozen=True):
    """Take this task into the pool; idempotent by task id.

    `delivered_tokens` reached the client before a loss: the task continues after them. `attempt` is
    the highest one from which the gateway took tokens or must take none, and at least 1 if it has
    submitted the task before: some of its tokens may still be in flight. After k other cells had
    the task it is at least k times `ATTEMPTS_PER_CELL`, which fences those cells. `prefixes` are
    the hashes that `prefix_hashes` makes of the prompt's first blocks. The gateway takes no token
    of `void_attempt` and of all below it, which ranks may still run.
    """

    header: TaskHeader
    payload: bytes
    delivered_tokens: tuple[int, ...] = ()
    attempt: int = 0
    prefixes: tuple[int, ...] = ()
    void_attempt: int = 0


class Cancel(Message, frozen=True):
    """The client is gone, or no one waits for this task any more."""

    task: TaskId


class Withdraw(Message, frozen=True):
    """Give this task up if no rank has had it: another cell has room for it."""

    task: TaskId


class Done(Message, frozen=True):
    """The gateway has the task's last token; this ends it even if the leader's report is lost."""

    task: TaskId


class StreamGap(Message, frozen=True):
    """Longest pause between two tokens of any stream that crossed into `epoch`."""

    epoch: int
    gap_ms: float


class BatchProgress(msgspec.Struct, frozen=True):
    """How far a batch is, in the terms of the OpenAI API; counts are lines."""

    batch: str
    status: str
    total: int
    completed: int
    failed: int


class BatchesRun(Message, frozen=True):
    """The batches that this gateway runs now; replaces the previous message. For display only."""

    batches: tuple[BatchProgress, ...]


class GatewayFiles(Message, frozen=True):
    """What became of a gateway's files; replaces the previous message. For operators only."""

    config_hash: str
    """Of the configuration that it runs with."""
    config_refusal: str = ""
    """Why its configuration file, as it is now, does not apply."""
    keys_refusal: str = ""
    """Why its file of API keys, as it is now, does not apply, or accepts nobody."""


class Welcome(Message, frozen=True):
    """Answer to `GatewayHello`; a changed `coordinator` means that it restarted."""

    coordinator: str


class CellLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of a cell."""

    queued: tuple[int, ...]
    """Queued tasks of each tier, most urgent first."""
    running: int
    """Tasks that leaders hold."""
    tasks_max: int
    """Tasks that the serving groups hold at once, at most."""
    blocks_free: int
    """Free KV blocks, over the leaders that serve."""
    blocks_total: int


class CellState(Message, frozen=True):
    """What a gateway must know of its cell; sent on every change."""

    layout: str
    epoch: int
    serving: bool
    world: int
    ranks_alive: int
    queued: int
    max_context_tokens: int
    draining: bool = False
    """The cell is about to end: it takes no new tasks and hands off those that it has."""
    load: CellLoad | None = None
    """None from a cell without a fleet."""


class PrefixesHeld(Message, frozen=True):
    """Blocks of prompts that the cell has read, as `prefix_hashes` names them, oldest first.

    Both sides keep the last `PREFIXES_MAX`, so evictions need no message. After the hello the
    cell sends all of them, and from then on the new and repeated ones.
    """

    hashes: tuple[int, ...]


class TaskFailed(Message, frozen=True):
    """The task will produce no more tokens; `code` is an OpenAI-style error code.

    `retry_after_s` is when another try is likely to succeed; 0 if unknown.
    """

    task: TaskId
    code: str
    message: str
    retry_after_s: int = 0


class Resubmit(Message, frozen=True):
    """The rank that ran this task is lost: submit it again with the tokens delivered so far.

    From now on the gateway takes no token of `attempt` or a lower one: tokens in flight would
    contradict those of the next attempt. It answers `Done` if it has the last token, `Cancel` if it
    does not know the task.
    """

    task: TaskId
    attempt: int = 0


class Withdrawn(Message, frozen=True):
    """Answer to `Withdraw`: the task has left the pool, and no rank ever had it."""

    task: TaskId


GatewayToCore = GatewayHello | Submit | Cancel | Done | StreamGap | Withdraw
GatewayUp = GatewayToCore | BatchesRun | GatewayFiles
GatewayDown = Welcome | CellState | PrefixesHeld | TaskFailed | Resubmit | Withdrawn

"""Every message between a gateway and a coordinator, and what they count by.

Pure values.
"""

import msgspec

from coordinator.protocol.messages.message import Message
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId

ATTEMPTS_PER_CELL = 2**32
"""Attempts that one cell may make of a task. Each cell that gets a task from another one counts on
behind the next multiple, so that tokens of an earlier cell are of lower attempts for good."""

PREFIXES_KEPT_MAX = 4_096
"""Blocks of prompts that a cell remembers, and every gateway of it."""


def cells_before(attempt: int) -> int:
    """Return how many other cells had a task before the one that made this attempt."""
    return attempt // ATTEMPTS_PER_CELL


class GatewayHello(Message, frozen=True):
    """First message of a gateway's session; all unfinished tasks are submitted again after it."""

    version: int
    gateway: str


class Submit(Message, frozen=True):
    """Take this task into the pool; idempotent by task id.

    `delivered_tokens` were already handed to the client (after a loss): the task goes on behind.
    `attempt` is the highest one that the gateway took tokens from or was told to take none of, and
    at least 1 if it submitted the task before: then some of its tokens may still be under way.
    After k other cells had the task it is at least k times `ATTEMPTS_PER_CELL`, which fences them.
    `prefixes` are the hashes of the prompt's first blocks, as `prefix_hashes` makes them.
    """

    header: TaskHeader
    payload: bytes
    delivered_tokens: tuple[int, ...] = ()
    attempt: int = 0
    prefixes: tuple[int, ...] = ()


class Cancel(Message, frozen=True):
    """The client is gone, or nobody waits for this task any more."""

    task: TaskId


class Withdraw(Message, frozen=True):
    """Give this task up if no rank has had it yet: another cell has room for it."""

    task: TaskId


class Done(Message, frozen=True):
    """The gateway has the task's last token; ends it even if the leader's report is lost."""

    task: TaskId


class StreamGap(Message, frozen=True):
    """Longest pause between two tokens of any stream that crossed into `epoch`."""

    epoch: int
    gap_ms: float


class BatchProgress(msgspec.Struct, frozen=True):
    """How far a batch is, in the words of the OpenAI API; counts are lines."""

    batch: str
    status: str
    total: int
    completed: int
    failed: int


class BatchesRun(Message, frozen=True):
    """The batches that this gateway runs now; replaces what it said before. For people only."""

    batches: tuple[BatchProgress, ...]


class Welcome(Message, frozen=True):
    """Answer to `GatewayHello`; a changed `coordinator` means it restarted."""

    coordinator: str


class CellLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy a cell is."""

    queued: tuple[int, ...]
    """Queued tasks of each tier, most urgent first."""
    running: int
    """Tasks that leaders hold."""
    tasks_max: int
    """Most tasks that the groups which serve now hold at once."""
    blocks_free: int
    """KV blocks that no task holds, over the leaders that serve."""
    blocks_total: int


class CellState(Message, frozen=True):
    """What a gateway must know of its cell, sent on every change."""

    layout: str
    epoch: int
    serving: bool
    world: int
    ranks_alive: int
    queued: int
    max_context_tokens: int
    draining: bool = False
    """The cell is about to end: it wants no new tasks, and to be rid of those it has."""
    load: CellLoad | None = None
    """None from a cell that is alone."""


class PrefixesHeld(Message, frozen=True):
    """Blocks of prompts that came to the cell, as `prefix_hashes` names them, oldest first.

    Both sides keep the last `PREFIXES_KEPT_MAX`, so that what is forgotten need not be told. After
    the hello all of them are told, and then those that came again or anew.
    """

    hashes: tuple[int, ...]


class TaskFailed(Message, frozen=True):
    """The task will produce no more tokens; `code` is an OpenAI-style error code.

    `retry_after_s` is when another try is likely to be served; 0 where that is not known.
    """

    task: TaskId
    code: str
    message: str
    retry_after_s: int = 0


class Resubmit(Message, frozen=True):
    """The rank that ran this task is lost: submit it again with the tokens delivered so far.

    From now on the gateway takes no token of `attempt` or a lower one, or tokens still under way
    would contradict those of the next attempt. It answers `Done` if it has the last token, `Cancel`
    if it does not know the task.
    """

    task: TaskId
    attempt: int = 0


class Withdrawn(Message, frozen=True):
    """Answer to `Withdraw`: the task has left the pool, and no rank ever had it."""

    task: TaskId


GatewayToCore = GatewayHello | Submit | Cancel | Done | StreamGap | Withdraw
GatewayUp = GatewayToCore | BatchesRun
GatewayDown = Welcome | CellState | PrefixesHeld | TaskFailed | Resubmit | Withdrawn

"""The gateway's book of tasks that have not ended, and what it must tell the coordinator.

A task is in the book from the engine request's arrival until its end was handed on, and it leaves
exactly once: finished, cancelled or failed. Whatever a broken session lost is said again when the
next one opens: every open task, and the ends of the last `ENDED_REMEMBERED` ones. Called by the
relay with its clock's time in seconds; pure.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from coordinator.protocol.messages.gateway import (
    ATTEMPTS_PER_CELL,
    Cancel,
    Done,
    GatewayUp,
    StreamGap,
    Submit,
    cells_before,
)
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId
from gateway.errors import ApiError, RequestState, api_error
from gateway.token_stream import TokenStream

OPEN_TASKS_MAX = 16_384
"""Most tasks at once; one more is refused with 429."""

PAYLOAD_BYTES_MAX = 2 * 1024**3
"""Most bytes of payload that open tasks keep for being submitted again."""

SUBMIT_WAIT_S = 30.0
"""How long a new task waits for the coordinator before it is refused with 503."""

DEADLINE_GRACE_S = 1.0
"""How long after a task's deadline the coordinator may take to say so, before it is said here."""

GAP_WAIT_S = 20.0
"""How long a stream waits for a token that is missing in its middle before it is failed."""

STALL_S = 5.0
"""A gateway that did not look at its tasks for so long stood still, and has not read what came."""

UNREAD_TOKENS_MAX = 1_024
"""Most tokens of a request that wait until its client has read what was sent before them."""

ENDED_REMEMBERED = 4_096
"""Number of ended tasks of each cell whose late tokens are still recognised."""

ONE_CELL = ""
"""The cell of a gateway that knows only one."""

EPOCHS_REMEMBERED = 16
GAP_REPORT_INTERVAL_S = 0.1
"""Least time between two reports of the same epoch."""

End = TypeVar("End", Cancel, Done)


class TaskTrace(Protocol):
    """The span of a task that is traced."""

    @property
    def traceparent(self) -> str:
        """Whose children the task's spans elsewhere are."""

    def crossed(self, epoch: int, pause_s: float) -> None:
        """Note the first token of `epoch`, which came after such a pause."""

    def failed(self, error_code: str) -> None:
        """Note why the task will end; `ended` follows."""

    def ended(self, task: "OpenRequest") -> None:
        """End the span: the task has left the book."""


_SIBLING = re.compile(r"\d+_(.+)")


@dataclass(slots=True)
class OpenRequest:
    """A request that is on its way: everything needed to submit it again behind `delivered`."""

    header: TaskHeader
    payload: bytes
    opened_at_s: float
    submitted: bool = False
    stream: TokenStream[Any] = field(default_factory=TokenStream)
    delivered: "array[int]" = field(default_factory=lambda: array("q"))
    """Token ids that were handed to the front end."""
    epoch: int = -1
    first_token_at_s: float = 0.0
    last_token_at_s: float = 0.0
    held_since_s: float | None = None
    trace: TaskTrace | None = None
    request: RequestState | None = None
    """What the HTTP side is to know of it."""
    cell: str | None = ONE_CELL
    """The cell that has it, or will have once there is a session; None while none can take it."""
    prefixes: tuple[int, ...] = ()
    """Hashes of the prompt's first blocks."""
    refused_by: tuple[str, ...] = ()
    """Cells that were full, or gave it up before a rank had it."""

    @property
    def id(self) -> TaskId:
        """The task's id."""
        return self.header.task

    def submit(self) -> Submit:
        """The message that makes the coordinator place it, behind what was delivered."""
        # A repetition names an attempt even before the first token came: it is a repetition.
        attempt = max(self.stream.attempt, 1) if self.submitted else self.stream.attempt
        return Submit(self.header, self.payload, tuple(self.delivered), attempt, self.prefixes)

    def leave(self) -> None:
        """Take no token of the cell that has it any more: another one goes on behind `delivered`.

        Attempts of the next cell are above all of this one, which may go on making new ones.
        """
        self.stream.fence((cells_before(self.stream.attempt) + 1) * ATTEMPTS_PER_CELL)
        self.held_since_s = None
        # Epochs are a cell's own.
        self.epoch = -1


def family(task: TaskId) -> str:
    """What the children of one request with n > 1 have in common: vLLM calls them `i_parent`."""
    match = _SIBLING.fullmatch(task)
    return match.group(1) if match else task


class OpenRequests:
    """Open tasks by id, and the last ended ones."""

    def __init__(self) -> None:
        self._open: dict[TaskId, OpenRequest] = {}
        self._families: dict[str, set[TaskId]] = {}
        self._ended: dict[str, OrderedDict[TaskId, Cancel | Done]] = {}
        """What each cell is to know of tasks that it has, or had."""
        self._told: set[TaskId] = set()
        self._payload_bytes = 0
        self._looked_at_s: float | None = None
        """When `expired` was asked last."""
        self._connected: set[str] = set()

    def __len__(self) -> int:
        """Number of open tasks."""
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate over the open tasks, oldest first."""
        return iter(self._open.values())

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload that are kept."""
        return self._payload_bytes

    def get(self, task: TaskId) -> OpenRequest | None:
        """Return the open task of that id."""
        return self._open.get(task)

    def open(
        self,
        header: TaskHeader,
        payload: bytes,
        now_s: float,
        trace: TaskTrace | None = None,
        request: RequestState | None = None,
        cell: str | None = ONE_CELL,
        prefixes: tuple[int, ...] = (),
    ) -> Submit | ApiError | None:
        """Take a new task; its Submit is None while its cell has no session."""
        assert header.task not in self._open, "vLLM gave two requests one id"
        if len(self._open) >= OPEN_TASKS_MAX:
            return api_error("queue_full", "The gateway holds as many requests as it can.")
        if self._payload_bytes + len(payload) > PAYLOAD_BYTES_MAX:
            return api_error("queue_full", "The gateway holds as many prompts as it can.")
        task = OpenRequest(header, payload, now_s, trace=trace, request=request)
        task.cell, task.prefixes = cell, prefixes
        self._open[task.id] = task
        self._families.setdefault(family(task.id), set()).add(task.id)
        self._payload_bytes += len(payload)
        if cell not in self._connected:
            return None
        message = task.submit()
        task.submitted = True
        return message

    def session_opened(self, cell: str = ONE_CELL) -> list[GatewayUp]:
        """Everything that the coordinator must know, in order; it drops what it knows already."""
        self._connected.add(cell)
        self._told.clear()
        messages: list[GatewayUp] = list(self._ended.get(cell, OrderedDict()).values())
        for task in self.of_cell(cell):
            messages.append(task.submit())
            task.submitted = True
        return messages

    def session_closed(self, cell: str = ONE_CELL) -> None:
        """Keep the cell's new tasks until the next session."""
        self._connected.discard(cell)

    def of_cell(self, cell: str | None) -> list[OpenRequest]:
        """Return the open tasks of a cell, or those that none has, oldest first."""
        return [task for task in self if task.cell == cell]

    def move(self, task: OpenRequest, cell: str) -> list[tuple[str, GatewayUp]]:
        """Let a task go on in another cell, which must have a session; return whom to tell what.

        The former cell is told that nobody waits for it any more, now or when it is back.
        """
        assert cell in self._connected, "a task is moved to a cell without a session"
        assert cell != task.cell, "a task is moved to where it is"
        told: list[tuple[str, GatewayUp]] = []
        if task.cell is not None and task.submitted:
            task.leave()
            cancel = self._remember(task.cell, task.id, Cancel(task.id))
            if task.cell in self._connected:
                told.append((task.cell, cancel))
        # What this cell was told of the task before, it has heard: it was connected since.
        self._ended.get(cell, OrderedDict()).pop(task.id, None)
        task.cell, task.submitted = cell, True
        return [*told, (cell, task.submit())]

    def forget(self, cell: str) -> None:
        """The cell is gone for good."""
        self._ended.pop(cell, None)

    def resubmit(
        self, task_id: TaskId, attempt: int, cell: str = ONE_CELL
    ) -> Submit | Done | Cancel:
        """The rank that ran `attempt` is lost: take no more of it, and tell how far it got."""
        task = self._open.get(task_id)
        if task is None or task.cell != cell:
            return self._ended.get(cell, OrderedDict()).get(task_id) or Cancel(task_id)
        task.stream.fence(attempt)
        if not task.stream.holding:
            task.held_since_s = None
        return task.submit()

    def finish(self, task_id: TaskId) -> Done:
        """The end of the task's stream was handed on."""
        return self._remember(self._close(task_id).cell, task_id, Done(task_id))

    def cancel(self, task_ids: Iterable[TaskId]) -> list[tuple[str, Cancel]]:
        """Nobody waits for these tasks any more; those that are not open are skipped."""
        told = []
        for task_id in dict.fromkeys(task_ids):
            if task_id in self._open:
                cell = self._close(task_id).cell
                self._told.add(task_id)
                cancel = self._remember(cell, task_id, Cancel(task_id))
                if cell is not None:
                    told.append((cell, cancel))
        return told

    def fail(self, task_id: TaskId) -> tuple[list[TaskId], list[tuple[str, Cancel]]]:
        """End a failed task and its siblings; return the ids to fail and what to tell.

        One choice of a request that has n of them cannot fail alone.
        """
        if task_id not in self._open:
            return [], []
        failed = sorted(self._families[family(task_id)], key=lambda other: other != task_id)
        return failed, self.cancel(failed)

    def stray(self, task_id: TaskId) -> Cancel | None:
        """Tokens came for a task that is not open: tell so, once per task and session."""
        if task_id in self._told:
            return None
        if len(self._told) >= ENDED_REMEMBERED:
            self._told.clear()
        self._told.add(task_id)
        return Cancel(task_id)

    def unread(self) -> list[Callable[[], None]]:
        """Return how to end the streams that are too far behind, because nobody reads them."""
        requests = {id(task.request): task.request for task in self}.values()
        return [
            request.give_up
            for request in requests
            if request is not None
            and request.give_up is not None
            and request.relayed_tokens - request.generated_tokens > UNREAD_TOKENS_MAX
        ]

    def expired(self, now_s: float) -> list[tuple[TaskId, ApiError]]:
        """Tasks that have waited too long for the coordinator or for a missing token.

        While this process stood still they waited for nobody but it: that time does not count.
        """
        out = []
        stall_s = 0.0 if self._looked_at_s is None else now_s - self._looked_at_s
        self._looked_at_s = now_s
        has_stalled = stall_s > STALL_S
        for task in self:
            if has_stalled and task.held_since_s is not None:
                task.held_since_s += stall_s
            deadline_ms = task.header.deadline_ms
            if deadline_ms and now_s - task.opened_at_s > deadline_ms / 1_000 + DEADLINE_GRACE_S:
                text = f"The request did not finish within {deadline_ms} ms."
                out.append((task.id, api_error("deadline_exceeded", text)))
            elif has_stalled:
                continue
            elif not task.submitted and now_s - task.opened_at_s > SUBMIT_WAIT_S:
                text = "The cell's coordinator cannot be reached."
                out.append((task.id, api_error("no_healthy_workers", text)))
            elif task.held_since_s is not None and now_s - task.held_since_s > GAP_WAIT_S:
                text = "A part of the generated text was lost."
                out.append((task.id, api_error("internal_error", text)))
        return out

    def _close(self, task_id: TaskId) -> OpenRequest:
        task = self._open.pop(task_id)
        if task.trace is not None:
            task.trace.ended(task)
        self._payload_bytes -= len(task.payload)
        siblings = self._families[family(task_id)]
        siblings.remove(task_id)
        if not siblings:
            del self._families[family(task_id)]
        return task

    def _remember(self, cell: str | None, task_id: TaskId, end: End) -> End:
        if cell is not None:
            ended = self._ended.setdefault(cell, OrderedDict())
            ended[task_id] = end
            while len(ended) > ENDED_REMEMBERED:
                ended.popitem(last=False)
        return end


class GapMeter:
    """Longest pause of any stream that crossed into an epoch, by epoch."""

    def __init__(self) -> None:
        self._max_s: dict[int, float] = {}
        self._reported: dict[int, tuple[float, float]] = {}

    def tokens_arrived(self, task: OpenRequest, epoch: int, now_s: float) -> None:
        """Note that tokens of `epoch` were delivered to a stream."""
        if epoch > task.epoch:
            if task.epoch >= 0:
                self._note(epoch, now_s - task.last_token_at_s)
                if task.trace is not None:
                    task.trace.crossed(epoch, now_s - task.last_token_at_s)
            task.epoch = epoch
        task.last_token_at_s = now_s

    def due(self, now_s: float) -> list[StreamGap]:
        """New maxima that may be reported now."""
        out = []
        for epoch, gap_s in self._max_s.items():
            reported_s, at_s = self._reported.get(epoch, (0.0, -GAP_REPORT_INTERVAL_S))
            if gap_s > reported_s and now_s - at_s >= GAP_REPORT_INTERVAL_S:
                self._reported[epoch] = (gap_s, now_s)
                out.append(StreamGap(epoch, gap_s * 1_000))
        return out

    def _note(self, epoch: int, gap_s: float) -> None:
        self._max_s[epoch] = max(gap_s, self._max_s.get(epoch, 0.0))
        while len(self._max_s) > EPOCHS_REMEMBERED:
            oldest = min(self._max_s)
            del self._max_s[oldest]
            self._reported.pop(oldest, None)

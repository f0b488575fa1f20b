"""The gateway's open tasks, and the messages about them that coordinators need.

A task is open from the arrival of its engine request until its end is delivered. It leaves exactly
once: finished, cancelled or failed. When a session opens again, everything that the broken one may
have lost is sent again: every open task, and the last `ENDED_REMEMBERED` ends. Called by the relay
with its clock's time in seconds; pure.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from comm_pool.layout import Rank
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
"""Most bytes of payload that open tasks keep for resubmission."""

SUBMIT_WAIT_S = 30.0
"""Longest wait of a new task for the coordinator; then it is refused with 503."""

DEADLINE_GRACE_S = 1.0
"""Time after a task's deadline for the coordinator to fail it; then the gateway does."""

GAP_WAIT_S = 20.0
"""Longest wait of a stream for a token missing in its middle; then it fails."""

STALL_S = 5.0
"""A longer gap between two checks means that the process stood still and read no messages."""

UNREAD_TOKENS_MAX = 1_024
"""Most delivered tokens of a request that its client has not read."""

ENDED_REMEMBERED = 4_096
"""Ended tasks remembered per cell, to recognise their late tokens."""

ONE_CELL = ""
"""The cell of a gateway that knows only one."""

EPOCHS_REMEMBERED = 16
GAP_REPORT_INTERVAL_S = 0.1
"""Shortest time between two reports of the same epoch."""

End = TypeVar("End", Cancel, Done)


class TaskTrace(Protocol):
    """The span of a traced task."""

    @property
    def traceparent(self) -> str:
        """The parent of the task's spans in other processes."""

    def crossed(self, epoch: int, pause_s: float) -> None:
        """Record that the first token of `epoch` arrived after a pause of `pause_s`."""

    def failed(self, error_code: str) -> None:
        """Record why the task will end; `ended` follows."""

    def ended(self, task: "OpenRequest") -> None:
        """End the span: the task is no longer open."""


_SIBLING = re.compile(r"\d+_(.+)")
_FIRST = "0_"


@dataclass(slots=True)
class OpenRequest:
    """An open request, with everything needed to resubmit it after `delivered`."""

    header: TaskHeader
    payload: bytes
    opened_at_s: float
    submitted: bool = False
    stream: TokenStream[Any] = field(default_factory=TokenStream)
    delivered: "array[int]" = field(default_factory=lambda: array("q"))
    """Token ids handed to the front end."""
    epoch: int = -1
    leader: Rank | None = None
    """The rank that pushed its last token."""
    switches: int = 0
    """Changes of a cell's layout between its first and its last token."""
    first_token_at_s: float = 0.0
    last_token_at_s: float = 0.0
    held_since_s: float | None = None
    trace: TaskTrace | None = None
    request: RequestState | None = None
    """State shared with the HTTP side."""
    cell: str | None = ONE_CELL
    """The cell that has the task, or gets it when a session opens; None if no cell can take it."""
    prefixes: tuple[int, ...] = ()
    """Hashes of the prompt's first blocks."""
    refused_by: tuple[str, ...] = ()
    """Cells that were full, or gave the task up before a rank had it."""

    @property
    def id(self) -> TaskId:
        """The task's id."""
        return self.header.task

    def submit(self) -> Submit:
        """Return the message that asks the coordinator to place it, after the delivered tokens."""
        # A resubmission names an attempt even before its first token, which marks it as one.
        attempt = max(self.stream.attempt, 1) if self.submitted else self.stream.attempt
        return Submit(
            self.header,
            self.payload,
            tuple(self.delivered),
            attempt,
            self.prefixes,
            self.stream.void_attempt,
        )

    def leave(self) -> None:
        """Accept no more tokens from its cell: another one continues after `delivered`.

        The next cell's attempts are numbered above all of this one's, which may still start new
        ones.
        """
        self.stream.fence((cells_before(self.stream.attempt) + 1) * ATTEMPTS_PER_CELL)
        self.held_since_s = None
        # Epochs are per cell.
        self.epoch = -1


def family(task: TaskId) -> str:
    """Return the id that the children of one request with n > 1 share: vLLM's `i_parent`."""
    match = _SIBLING.fullmatch(task)
    return match.group(1) if match else task


def is_first_choice(task: TaskId) -> bool:
    """Return whether a task is the first one of its prompt, or the only one."""
    match = _SIBLING.fullmatch(task)
    return match is None or task.startswith(_FIRST)


class OpenRequests:
    """Open tasks by id, and the most recently ended ones."""

    def __init__(self) -> None:
        self._open: dict[TaskId, OpenRequest] = {}
        self._families: dict[str, set[TaskId]] = {}
        self._ended: dict[str, OrderedDict[TaskId, Cancel | Done]] = {}
        """The end of each task that a cell has, or had, to be sent to that cell."""
        self._stray_cancels: set[TaskId] = set()
        """Closed tasks whose cancel is sent; `stray` sends no second one in the session."""
        self._payload_bytes = 0
        self._checked_at_s: float | None = None
        """Time of the last call of `expired`."""
        self._connected: set[str] = set()

    def __len__(self) -> int:
        """Number of open tasks."""
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate over the open tasks, oldest first."""
        return iter(self._open.values())

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload held by open tasks."""
        return self._payload_bytes

    def get(self, task: TaskId) -> OpenRequest | None:
        """Return the open task with this id."""
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
        """Open a task, or return why not; None while its cell has no session."""
        assert header.task not in self._open, "two requests of vLLM have one id"
        if len(self._open) >= OPEN_TASKS_MAX:
            return api_error(
                "queue_full", "The gateway is at its limit of open requests: try again later."
            )
        if self._payload_bytes + len(payload) > PAYLOAD_BYTES_MAX:
            return api_error(
                "queue_full", "The gateway has no memory for more prompts: try again later."
            )
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
        """Return every open task and remembered end, in order; coordinators ignore known ones."""
        self._connected.add(cell)
        self._stray_cancels.clear()
        messages: list[GatewayUp] = list(self._ended.get(cell, OrderedDict()).values())
        for task in self.of_cell(cell):
            messages.append(task.submit())
            task.submitted = True
        return messages

    def session_closed(self, cell: str = ONE_CELL) -> None:
        """Keep the cell's new tasks until the next session."""
        self._connected.discard(cell)

    def of_cell(self, cell: str | None) -> list[OpenRequest]:
        """Return the open tasks of a cell, or those of no cell, oldest first."""
        return [task for task in self if task.cell == cell]

    def move(self, task: OpenRequest, cell: str) -> list[tuple[str, GatewayUp]]:
        """Move a task to a cell that has a session; return each message with its cell.

        The former cell gets a Cancel, immediately or when it reconnects.
        """
        assert cell in self._connected, "a task is moved to a cell without a session"
        assert cell != task.cell, "a task is moved to its own cell"
        messages: list[tuple[str, GatewayUp]] = []
        if task.cell is not None and task.submitted:
            task.leave()
            cancel = self._remember(task.cell, task.id, Cancel(task.id))
            if task.cell in self._connected:
                messages.append((task.cell, cancel))
        # The cell has been connected since, so it received this end already.
        self._ended.get(cell, OrderedDict()).pop(task.id, None)
        task.cell, task.submitted = cell, True
        return [*messages, (cell, task.submit())]

    def forget(self, cell: str) -> None:
        """Drop the remembered ends of a cell that is gone for good."""
        self._ended.pop(cell, None)

    def resubmit(
        self, task_id: TaskId, attempt: int, cell: str = ONE_CELL
    ) -> Submit | Done | Cancel:
        """Fence off `attempt`, whose rank is lost; return what the coordinator must know."""
        task = self._open.get(task_id)
        if task is None or task.cell != cell:
            return self._ended.get(cell, OrderedDict()).get(task_id) or Cancel(task_id)
        task.stream.fence(attempt)
        if not task.stream.holding:
            task.held_since_s = None
        return task.submit()

    def finish(self, task_id: TaskId) -> Done:
        """Close a task whose stream was delivered to its end."""
        return self._remember(self._close(task_id).cell, task_id, Done(task_id))

    def cancel(self, task_ids: Iterable[TaskId]) -> list[tuple[str, Cancel]]:
        """Close tasks that no client waits for; skip those that are not open."""
        messages = []
        for task_id in dict.fromkeys(task_ids):
            if task_id in self._open:
                cell = self._close(task_id).cell
                self._stray_cancels.add(task_id)
                cancel = self._remember(cell, task_id, Cancel(task_id))
                if cell is not None:
                    messages.append((cell, cancel))
        return messages

    def fail(self, task_id: TaskId) -> tuple[list[TaskId], list[tuple[str, Cancel]]]:
        """Close a failed task and the other choices of its request.

        Returns the ids to fail, the task's first, and the cancels to send. One of n choices cannot
        fail alone.
        """
        if task_id not in self._open:
            return [], []
        failed = sorted(self._families[family(task_id)], key=lambda other: other != task_id)
        return failed, self.cancel(failed)

    def stray(self, task_id: TaskId) -> Cancel | None:
        """Return a Cancel for tokens of a task that is not open, once per task and session."""
        if task_id in self._stray_cancels:
            return None
        if len(self._stray_cancels) >= ENDED_REMEMBERED:
            self._stray_cancels.clear()
        self._stray_cancels.add(task_id)
        return Cancel(task_id)

    def unread(self) -> list[Callable[[], None]]:
        """Return the `give_up` of each request with more than `UNREAD_TOKENS_MAX` unread tokens."""
        requests = {id(task.request): task.request for task in self}.values()
        return [
            request.give_up
            for request in requests
            if request is not None
            and request.give_up is not None
            and request.relayed_tokens - request.generated_tokens > UNREAD_TOKENS_MAX
        ]

    def expired(self, now_s: float) -> list[tuple[TaskId, ApiError]]:
        """Return tasks that have waited too long for the coordinator or for a missing token.

        Time in which this process stood still does not count: it read no messages then.
        """
        out = []
        stall_s = 0.0 if self._checked_at_s is None else now_s - self._checked_at_s
        self._checked_at_s = now_s
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
                text = "The gateway cannot reach a coordinator: try again later."
                out.append((task.id, api_error("no_healthy_workers", text)))
            elif task.held_since_s is not None and now_s - task.held_since_s > GAP_WAIT_S:
                text = "A part of the generated text was lost: send the request again."
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
    """The longest pause of any stream that crossed into an epoch, by epoch."""

    def __init__(self) -> None:
        self._max_s: dict[int, float] = {}
        self._reported: dict[int, tuple[float, float]] = {}

    def tokens_arrived(self, task: OpenRequest, epoch: int, now_s: float) -> None:
        """Record that tokens of `epoch` were delivered to a stream."""
        if epoch > task.epoch:
            if task.epoch >= 0:
                task.switches += epoch - task.epoch
                self._note(epoch, now_s - task.last_token_at_s)
                if task.trace is not None:
                    task.trace.crossed(epoch, now_s - task.last_token_at_s)
            task.epoch = epoch
        task.last_token_at_s = now_s

    def due(self, now_s: float) -> list[StreamGap]:
        """Return the new maxima that may be reported now."""
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

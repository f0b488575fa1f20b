"""The relay: AsyncLLM's engine 0 on one side, the coordinator and the group leaders on the other.

AsyncLLM runs in the same process and submits requests by a direct call. Only its utility calls at
start come over vLLM's sockets. Everything runs in one thread, and each message is handled
completely before the next. `OpenRequests` decides about tasks and `TokenStream` about tokens; the
relay moves frames. If all spans of a batch are in order, its frames go to AsyncLLM unchanged;
otherwise the batch is decoded, trimmed and encoded again.
"""

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import (
    CellState,
    GatewayDown,
    GatewayUp,
    PrefixesHeld,
    Resubmit,
    TaskFailed,
    Welcome,
    Withdrawn,
)
from coordinator.protocol.messages.rank import TokenBatch, TokenSpan
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.prefixes import prefix_hashes
from coordinator.protocol.terms import TaskId
from gateway.admission.tiers import tier_of_priority
from gateway.engine import wire as engine
from gateway.errors import ApiError, api_error
from gateway.fleet.rebalancer import Rebalancer, needs_of
from gateway.fleet.roster import ALONE, CellRoster, group_of
from gateway.http.spans import TaskSpan, TaskSpans
from gateway.open_requests import GapMeter, OpenRequest, OpenRequests, is_first_choice
from gateway.telemetry.meter import RequestMeter
from gateway.token_stream import Answer, Trim, Verdict

PAYLOAD_BYTES_MAX = wire.MAX_MESSAGE_BYTES // 2
"""Largest payload of one task: its Submit must fit into one message with everything else in it."""

Frames = Sequence[bytes]
SendFrames = Callable[[Frames], None]

log = structlog.get_logger(__name__)


class Session(Protocol):
    """Sends messages to coordinators."""

    def send(self, message: GatewayUp, cell: str) -> None:
        """Send to a cell soon; drop the message if the cell has no session."""


class Relay:
    """Handles every arriving message; owns the open tasks."""

    def __init__(
        self,
        session: Session,
        to_front_end: SendFrames,
        *,
        gateway: str,
        reply_to: str,
        clock: Callable[[], float] = time.monotonic,
        meter: RequestMeter | None = None,
        spans: TaskSpans | None = None,
        answer_call: SendFrames | None = None,
        cells: CellRoster | None = None,
    ) -> None:
        """Start without tasks; `to_front_end` must accept outputs without blocking.

        `answer_call` sends the answer to a call that arrived over vLLM's socket.
        """
        self._session = session
        self._clock = clock
        self._to_front_end = to_front_end
        self._answer_call = answer_call or to_front_end
        self._gateway = gateway
        self._reply_to = reply_to
        self._gaps: defaultdict[str, GapMeter] = defaultdict(GapMeter)
        self._meter = meter or RequestMeter()
        self._spans = spans
        self.book = OpenRequests()
        self.cells = cells or CellRoster.alone()
        self._spread = Rebalancer(self.book, self.cells, self._meter.moved)

    @property
    def cell(self) -> CellState | None:
        """Latest state of the cell most likely to serve; None without a session."""
        return self.cells.state

    def front_end_called(self, frames: Frames) -> None:
        """Handle a message from AsyncLLM's socket to its engine."""
        if (call := engine.decode_call(frames)) is not None:
            self.on_front_end_message(call)

    def on_front_end_message(self, message: engine.EngineMessage) -> None:
        """Handle a message from AsyncLLM to its engine."""
        match message:
            case engine.AddRequest() as request:
                self._submit(request)
            case engine.AbortRequests(request_ids):
                self._cancel([TaskId(request_id) for request_id in request_ids])
            case engine.UtilityCall() as call:
                self._answer_call(engine.answer_utility(call))
            case engine.UnfitRequest(request_id, reason):
                self._answer_failure([request_id], api_error("unsupported_parameter", reason))

    def session_opened(self, cell: str = ALONE) -> Iterable[GatewayUp]:
        """Return the messages that report all open tasks of a cell to its coordinator."""
        self.cells.opened(cell)
        return self.book.session_opened(cell)

    def session_closed(self, cell: str = ALONE) -> None:
        """Keep streams open; new tasks wait, or go to another cell."""
        self.cells.closed(cell, self._clock())
        self.book.session_closed(cell)

    def on_coordinator_message(self, message: GatewayDown, cell: str = ALONE) -> None:
        """Handle a message from a cell's coordinator."""
        match message:
            case CellState() | PrefixesHeld():
                if self.cells.update(cell, message):
                    self._send_all(self._spread.cell_changed(self._clock()))
            case TaskFailed(task, code, text, retry_after_s):
                self._send_all(moved := self._spread.refused(task, code, cell))
                if not moved and self._is_in(task, cell):
                    self._fail(task, api_error(code, text, retry_after_s=retry_after_s))
            case Resubmit(task, attempt):
                self._session.send(self.book.resubmit(task, attempt, cell), cell)
            case Withdrawn(task):
                self._send_all(self._spread.withdrawn(task, cell))
            case Welcome():
                log.warning("welcome_repeated", coordinator=message.coordinator)

    def on_tokens(self, frames: Frames) -> None:
        """Handle a batch of tokens pushed by a leader."""
        try:
            batch = wire.decode_token_batch(frames[0])
        except (engine.WireError, IndexError) as error:
            log.warning("token_batch_refused", reason=str(error))
            return
        try:
            self._deliver(batch, frames[1:])
        except Exception:
            # The batch may be counted but not delivered, so its streams must not go on.
            log.exception("token_batch_lost", rank=batch.rank)
            for span in batch.spans:
                self._fail(span.task, _LOST)

    def _deliver(self, batch: TokenBatch, frames: Frames) -> None:
        now_s = self._clock()
        token_ids = engine.read_token_ids(frames)
        _check_batch(batch, token_ids)
        tasks = [self.book.get(span.task) for span in batch.spans]
        answers = [self._offer(task, span) for task, span in zip(tasks, batch.spans, strict=True)]
        if all(answer is Verdict.FORWARD for answer in answers) and not any(
            task.stream.holding for task in tasks if task is not None
        ):
            self._to_front_end(frames)
            for task, span, ids in zip(tasks, batch.spans, token_ids, strict=True):
                assert task is not None, "a span of no open task is dropped"
                self._delivered(task, span, ids, batch, now_s)
                if span.finished:
                    self._finish(task, now_s)
        else:
            self._deliver_some(batch, frames, tasks, answers)
        self._report_gaps(now_s)

    def tick(self) -> None:
        """Fail tasks that have waited too long; called at a fixed interval."""
        now_s = self._clock()
        for task, error in self.book.expired(now_s):
            self._fail(task, error)
        for give_up in self.book.unread():
            give_up()
        self._send_all(self._spread.tick(now_s))
        self._report_gaps(now_s)

    def give_up(self, error: ApiError) -> None:
        """Fail every open task, because the process is ending."""
        for task in [task.id for task in self.book]:
            self._fail(task, error)

    def _submit(self, request: engine.AddRequest) -> None:
        span = self._begin_span(request)
        header = TaskHeader(
            task=TaskId(request.request_id),
            gateway=self._gateway,
            reply_to=self._reply_to,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            tier=tier_of_priority(request.priority),
            deadline_ms=request.deadline_ms,
            tenant=request.tenant,
            trace=span.traceparent if span is not None else "",
        )
        payload = wire.encode(request.frames)
        if len(payload) > PAYLOAD_BYTES_MAX:
            error = api_error("request_too_large", "The prompt is too large: shorten it.")
            self._refuse(header.task, error, span)
            return
        if request.state is not None and is_first_choice(header.task):
            request.state.prompt_tokens += request.prompt_tokens
        prefixes = prefix_hashes(request.prompt_token_ids, request.cache_salt)
        cell = self.cells.choose(needs_of(header), prefixes)
        answer = self.book.open(
            header,
            payload,
            now_s=self._clock(),
            trace=span,
            request=request.state,
            cell=cell,
            prefixes=prefixes,
        )
        if isinstance(answer, ApiError):
            self._refuse(header.task, answer, span)
        elif answer is not None and cell is not None:
            self.cells.sent(cell, prefixes)
            self._session.send(answer, cell)

    def _begin_span(self, request: engine.AddRequest) -> TaskSpan | None:
        if not request.trace or self._spans is None:
            return None
        return self._spans.begin(
            TaskId(request.request_id),
            request.trace,
            tier=tier_of_priority(request.priority),
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
        )

    def _refuse(self, task: TaskId, error: ApiError, span: TaskSpan | None) -> None:
        if span is not None:
            span.refused(error.code)
        self._answer_failure([task], error)

    def _offer(self, task: OpenRequest | None, span: TokenSpan) -> Answer:
        if task is not None:
            return task.stream.offer(span)
        if (cancel := self.book.stray(span.task)) is not None:
            # A batch does not name its cell, so every cell gets the cancel.
            self._send_all((cell, cancel) for cell in self.cells.up)
        return Verdict.DROP

    def _deliver_some(
        self,
        batch: TokenBatch,
        frames: Frames,
        tasks: Sequence[OpenRequest | None],
        answers: Sequence[Answer],
    ) -> None:
        """Deliver the parts of a batch that `answers` allow, and held spans they unblock."""
        content = engine.decode_outputs(frames)
        taken: list[_Part] = []
        for task, answer, span, output in zip(
            tasks, answers, batch.spans, content.outputs, strict=True
        ):
            if task is None:
                continue
            part = _Part(task, span, output, batch)
            if answer is Verdict.HOLD:
                self._hold(part)
            elif answer is not Verdict.DROP and self._take(part, answer):
                taken.append(part)
            taken += [held for ready, held in task.stream.ready() if self._take(held, ready)]
            if not task.stream.holding:
                task.held_since_s = None
        if taken:
            outputs = [part.output for part in taken]
            self._to_front_end(engine.encode_outputs(content, outputs))
        for task in {part.task.id: part.task for part in taken if part.task.stream.ended}.values():
            if self.book.get(task.id) is not None:
                self._finish(task, self._clock())

    def _hold(self, part: "_Part") -> None:
        if part.task.held_since_s is None:
            part.task.held_since_s = self._clock()
        if not part.task.stream.hold(part.span, part):
            self._fail(part.task.id, _LOST)

    def _take(self, part: "_Part", answer: Answer) -> bool:
        """Trim a part to its new tokens and deliver it; False if its task has failed."""
        task, output = part.task, part.output
        if self.book.get(task.id) is not task:
            return False
        if isinstance(answer, Trim):
            repeated = array("q", output.new_token_ids[: answer.skip])
            first = part.span.first
            if repeated != task.delivered[first : first + len(repeated)]:
                # The new attempt continues from tokens that differ from those the client has.
                self._fail(task.id, _LOST)
                return False
            engine.trim_output(output, answer.skip, answer.keep, finished=answer.finished)
        self._delivered(task, part.span, output.new_token_ids, part.batch, self._clock())
        return True

    def _delivered(
        self,
        task: OpenRequest,
        span: TokenSpan,
        token_ids: Sequence[int],
        batch: TokenBatch,
        now_s: float,
    ) -> None:
        if token_ids:
            if task.request is not None:
                task.request.relayed_tokens += len(token_ids)
                if not task.delivered:
                    if not task.request.first_token_at_s:
                        task.request.first_token_at_s = now_s
                    known_ms = task.request.queue_wait_ms or 0
                    task.request.queue_wait_ms = max(span.waited_ms, known_ms)
            self._meter.tokens(task, len(token_ids), now_s)
            task.delivered.extend(token_ids)
            task.leader = batch.rank
            self._gaps[task.cell or ALONE].tokens_arrived(task, batch.epoch, now_s)

    def _finish(self, task: OpenRequest, now_s: float) -> None:
        """Close a task whose last token was delivered."""
        self._note_course(task)
        self._meter.ended(task, now_s)
        self._session.send(self.book.finish(task.id), task.cell or ALONE)

    def _cancel(self, tasks: Sequence[TaskId]) -> None:
        """Close tasks that no client waits for any more; some may not be open."""
        now_s = self._clock()
        for task in {name: self.book.get(name) for name in tasks}.values():
            if task is not None:
                self._note_course(task)
                self._meter.ended(task, now_s)
        self._send_all(self.book.cancel(tasks))

    def _note_course(self, task: OpenRequest) -> None:
        """Tell the HTTP side where a task that ends was computed."""
        request = task.request
        if request is None:
            return
        request.switches = max(request.switches, task.switches)
        request.cell = task.cell or ""
        state = self.cells.state_of(request.cell)
        if state is not None:
            request.layout = state.layout
            is_known = task.leader is not None and task.epoch == state.epoch
            request.group = group_of(state.layout, state.world, task.leader) if is_known else ""

    def _send_all(self, messages: Iterable[tuple[str, GatewayUp]]) -> None:
        for cell, message in messages:
            self._session.send(message, cell)

    def _is_in(self, task: TaskId, cell: str) -> bool:
        """Return whether the cell has the task; only then do its messages about it count."""
        known = self.book.get(task)
        return known is not None and known.cell == cell

    def _report_gaps(self, now_s: float) -> None:
        for cell, gaps in self._gaps.items():
            self._send_all((cell, gap) for gap in gaps.due(now_s))

    def _fail(self, task: TaskId, error: ApiError) -> None:
        broken = self.book.get(task)
        if broken is not None and broken.trace is not None:
            broken.trace.failed(error.code)
        failed, cancels = self.book.fail(task)
        if broken is None:
            return
        self._note_course(broken)
        self._meter.ended(broken, self._clock(), failed=True)
        log.info("task_failed", task=task, code=error.code, reason=error.message)
        self._answer_failure(failed, error)
        self._send_all(cancels)

    def _answer_failure(self, tasks: Sequence[str], error: ApiError) -> None:
        self._to_front_end(engine.encode_failure(tasks, error))


@dataclass(frozen=True, slots=True)
class _Part:
    """One task's share of a batch."""

    task: OpenRequest
    span: TokenSpan
    output: engine.Output
    batch: TokenBatch


_LOST = api_error(
    "internal_error", "A part of the generated text was lost: send the request again."
)


def _check_batch(batch: TokenBatch, token_ids: Sequence[Sequence[int]]) -> None:
    if [span.count for span in batch.spans] != [len(ids) for ids in token_ids]:
        raise engine.WireError("the spans do not describe the outputs.")

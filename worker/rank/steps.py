"""The steps of a rank: which was launched last, whose tokens are to be taken, what goes out.

Where steps run asynchronously the device computes one while the host prepares the next, and a
switch is prepared in the same way: a rank leaves its group with the last step still under way. It
*trails* then. What the next group launches stands behind it in the device's queue, so the device
finds the first new step where the last old one ends. Its tokens are taken as soon as they are
there. Used by the rank's main loop alone, unless said otherwise.

Where the members of an aborted formation are let out of its collectives, what its steps give is
nothing. Whoever takes the tokens of one finds `PeerLostError` instead.

On CPU a step trails in the same way if it is *held*: it is computed only when its tokens are asked
for. Every member of the group holds it, so none may wait for another before it has caught up.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Mode
from coordinator.protocol.messages.rank import TokenBatch, TokenSpan
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.switch_participant import Joined
from coordinator.protocol.terms import Binding, EndCause
from worker.engine.inflight_step import POLL_S, InflightStep
from worker.engine.mode import PreparedMode
from worker.engine.rank_engine import RankEngine
from worker.io.step_queue import QueueMessage, Step
from worker.io.token_publisher import TokenPublisher
from worker.rank.deferred_step import DeferredStep
from worker.rank.led_tasks import LedTasks
from worker.rank.step_log import StepLog

log = structlog.get_logger()


class StepOwner(Protocol):
    """What steps ask of the runtime that they belong to."""

    engine: RankEngine
    book: LedTasks
    ended: list[TaskEnded]

    @property
    def selected(self) -> PreparedMode | None:
        """The mode of the joined group."""

    def lead(self, message: QueueMessage, *, wait_s: float = ...) -> None:
        """Tell the followers of the joined group."""

    def freed(self, group: Group) -> None:
        """Tasks of a group that this rank has left have ended."""

    def lose_last_step(self, group: Group) -> None:
        """The last step of a group that this rank has left lacks a member."""


class Steps:
    """Launches steps of the selected mode, and takes their tokens."""

    def __init__(self, runtime: StepOwner, incarnation: int, publisher: TokenPublisher) -> None:
        self._runtime = runtime
        self._incarnation = incarnation
        self._publisher = publisher
        self._inflight: InflightStep | None = None
        self._behind: tuple[Joined, Callable[[], bool]] | None = None
        self._left_end_ns: int | None = None
        self._held: DeferredStep | None = None
        self.count = self.sp_count = 0
        self.log = StepLog()
        self.started_ns = 0
        """When the last step was launched here, on the host's monotonic clock."""
        self.ended_ns = 0
        """When the last step was known to be over; 0 where only its leader knows."""
        self.ends_ns = 0
        """When the last step that was launched as a leader is expected to end."""
        self.decode_ns = 0
        """How long a step usually takes that reads no prompt; 0 until there was one."""

    @property
    def has_inflight(self) -> bool:
        """A step was launched whose tokens were not taken."""
        return self._inflight is not None

    @property
    def trails(self) -> bool:
        """A step of a group that was left is under way."""
        under_way = self._inflight
        return under_way is not None and under_way.mode is not self._runtime.selected

    @property
    def behind(self) -> Joined | None:
        """The group that was left last, as long as the device may compute in it.

        Other threads may ask.
        """
        held = self._behind
        if held is None:
            return None
        joined, is_done = held
        if is_done():
            self._behind = None
            return None
        return joined

    def left(self, joined: Joined | None) -> None:
        """The rank leaves this group; its last step may be under way."""
        held = self._held
        is_done = self._runtime.engine.done() if held is None else held.query
        self._behind = (joined, is_done) if joined is not None else None

    def lead(self, mode: PreparedMode, binding: Binding, epoch: int) -> int:
        """Launch one step of the led group, finish the one before; returns its microseconds.

        Where results come synchronously (CPU) the step launched is the step finished.
        """
        started = time.perf_counter_ns()
        assert mode.scheduler is not None
        self.catch_up()
        if self._inflight is not None and self._inflight.goes_first():
            self.settle()
        if mode.scheduler.has_requests():
            plan = self._plan(mode, binding)
            if plan.is_empty:
                # Only ids of ended tasks are in it: the tokens of the step under way go first.
                self.settle()
            usual_ns = self._usual_ns(mode, plan)
            if not (plan.is_empty or plan.reads_prompts):
                self.decode_ns = usual_ns
            begins_ns = self.ends_ns if self.has_inflight else 0
            self._expect(max(time.monotonic_ns(), begins_ns) + usual_ns)
            self._runtime.lead(Step(binding.formation, plan))
            result = self.execute(mode, plan)
            group, formation = binding.group, binding.formation
            launched = InflightStep(plan, result, self.started_ns, mode, group, epoch, formation)
            before, self._inflight = self._inflight, launched
            if before is not None:
                self._finish(before)
                self._expect(self.ended_ns + usual_ns)
            if not launched.is_asynchronous:
                self.settle()
        else:
            self.settle()
        return (time.perf_counter_ns() - started) // 1000

    def _plan(self, mode: PreparedMode, binding: Binding) -> Any:
        assert mode.scheduler is not None
        plan = mode.scheduler.plan_step(self.settle)
        plan.mode = mode.mode_of_step(binding.group, plan.tokens)
        return plan

    def hold(self, mode: PreparedMode, binding: Binding, epoch: int) -> None:
        """Plan the last step of the led group before it is left, send it, and hold it."""
        plan = self._plan(mode, binding)
        self._runtime.lead(Step(binding.formation, plan, is_held=True))
        held = self._hold(mode, plan, binding.group)
        launched_ns, group = time.monotonic_ns(), binding.group
        self._inflight = InflightStep(
            plan, held, launched_ns, mode, group, epoch, binding.formation
        )

    def _hold(self, mode: PreparedMode, plan: Any, group: Group) -> DeferredStep:
        # The width stays selected until the next group is joined, and that comes behind it.
        self._held = held = DeferredStep(mode.ready(plan), group)
        self._count(plan)
        return held

    @property
    def is_held(self) -> bool:
        """A step waits to be computed."""
        return self._held is not None and not self._held.query()

    @property
    def is_late(self) -> bool:
        """It has waited for long enough."""
        return self._held is not None and self._held.is_late

    def catch_up(self) -> None:
        """Compute the step that is held, if there is one.

        Raises `PeerLostError` if its formation was aborted and is not left yet.
        """
        held, self._held = self._held, None
        under_way = self._inflight
        if under_way is not None and under_way.result is held:
            self.settle()
        elif held is not None and not held.query():
            try:
                held.get_output()
            except PeerLostError:
                if self._runtime.selected is not None:
                    raise
                self._lose(held)

    def _lose(self, held: DeferredStep) -> None:
        """The last step of a group that was left was not computed by all."""
        log.warning("held_step_lost", group=held.group.name)
        self._runtime.lose_last_step(held.group)

    def _usual_ns(self, mode: PreparedMode, plan: Any) -> int:
        """How long steps like this one have taken, or else took at start-up."""
        if plan.is_empty:
            return 0  # It only tells followers which tasks have ended.
        seconds = self.log.usual_s(plan, mode.key.width)
        if seconds is None:
            curve = mode.times.curves.get(plan.mode)
            seconds = curve.us(plan.tokens) / 1e6 if curve is not None else 0.0
        return int(seconds * 1e9)

    def _expect(self, ends_ns: int) -> None:
        self.ends_ns = ends_ns
        engine = self._runtime.engine
        engine.mailboxes[engine.spec.rank].expect_end(ends_ns)

    def execute(self, mode: PreparedMode, plan: Any) -> Any:
        """Launch a step that this rank or its leader has planned."""
        self.started_ns = time.monotonic_ns()
        self._count(plan)
        return mode.execute(plan)

    def _count(self, plan: Any) -> None:
        self.count += 1
        self.sp_count += plan.mode not in (Mode.DP, Mode.TP)

    def follow(self, mode: PreparedMode, step: Step, binding: Binding) -> None:
        """Launch a step that this rank's leader has planned, and will take the tokens of."""
        plan = step.plan
        if self._is_lost(binding.group, binding.formation):
            raise PeerLostError(binding.formation)
        if step.is_held:
            self._hold(mode, plan, binding.group)
            self.ended_ns = 0
            return
        result = self.execute(mode, plan)
        # On CUDA a follower may have no result that could be asked.
        is_over = (
            self._runtime.engine.is_synchronous and not InflightStep(plan, result).is_asynchronous
        )
        self.ended_ns = time.monotonic_ns() if is_over else 0

    def settle(self) -> None:
        """Finish the step under way, if any: afterwards the led group is at a safe point.

        Raises `PeerLostError` if its formation was aborted; it is over even so.
        """
        under_way, self._inflight = self._inflight, None
        if under_way is None:
            return
        try:
            self._finish(under_way)
        except PeerLostError:
            held = under_way.result
            if not isinstance(held, DeferredStep) or self._runtime.selected is not None:
                raise
            self._lose(held)

    def drop(self, formation: int) -> None:
        """Wait for what was launched in a formation; its step under way is not finished."""
        under_way = self._inflight
        if under_way is not None and under_way.formation != formation:
            self.settle()  # It trails, and is a step of another formation.
            under_way = None
        if self.is_held:
            self._held = under_way = None  # Nobody has begun to compute it.
        is_done = self._runtime.engine.done()
        # While the rank is joined to it, the watchdog lets what was launched run to its end.
        while not (is_done() and (under_way is None or under_way.is_ready())):
            time.sleep(POLL_S)
        self._inflight = None

    def _is_lost(self, group: Group, formation: int) -> bool:
        communicators = self._runtime.engine.communicators
        return bool(communicators.is_aborted(group.ranks, formation))

    def _counts(self, step: InflightStep) -> bool:
        """Whether what the step gave is what it should.

        One that trails does unless its members were let out: it may have ended before the loss.
        """
        if step.group is None:
            return True
        if step.mode is not self._runtime.selected:
            return step.group.ranks not in self._runtime.engine.communicators.closed
        return not self._is_lost(step.group, step.formation)

    def settle_if_ready(self) -> None:
        """Take the tokens of a step that trails, if they are there."""
        under_way = self._inflight
        if self.trails and under_way is not None and under_way.is_ready():
            self.settle()

    def take_left_end(self) -> int | None:
        """When a step that trailed was over, once."""
        ended_ns, self._left_end_ns = self._left_end_ns, None
        return ended_ns

    def _finish(self, step: InflightStep) -> None:
        result = step.tokens()
        # Asked behind the tokens: marks are made before anybody is let out. Of a step that trails
        # nobody catches it: tasks may have moved on with its KV, so this process ends.
        if not self._counts(step):
            raise PeerLostError(step.formation)
        scheduler, now_ns = step.mode.scheduler, time.monotonic_ns()
        self.ended_ns = now_ns
        self.log.ended(step.plan, step.mode.key.width, step.began_ns, now_ns)
        frees = scheduler.frees_behind
        outputs = scheduler.finish_step(step.plan, result)
        if outputs:
            self._push(outputs, step.epoch)
        if step.mode is not self._runtime.selected:
            self._left_end_ns = now_ns
            frees |= any(output.finished for output in outputs)
            if step.group is not None and frees:
                self._runtime.freed(step.group)

    def _push(self, outputs: Sequence[Any], epoch: int) -> None:
        runtime, book = self._runtime, self._runtime.book
        by_gateway: dict[str, tuple[list[TokenSpan], list[Any]]] = {}
        for output in outputs:
            led = book.get(output.request_id)
            if led is None:
                continue
            task = led.header.task
            span = book.emit(task, len(output.new_token_ids), finished=output.finished)
            spans, batch = by_gateway.setdefault(led.header.reply_to, ([], []))
            spans.append(span)
            batch.append(output)
            if output.finished:
                book.close(task, EndCause.FINISHED)
                runtime.ended.append(TaskEnded(task, led.attempt, EndCause.FINISHED, led.emitted))
        for reply_to, (spans, batch) in by_gateway.items():
            header = TokenBatch(runtime.engine.spec.rank, self._incarnation, epoch, tuple(spans))
            self._publisher.push(reply_to, header, batch)

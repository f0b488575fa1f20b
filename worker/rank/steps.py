"""The steps of a rank: launches them, collects their tokens and sends these out.

Where steps run asynchronously, a rank leaves its group with the last step still in flight: a
*detached step*. The device queues the next group's first step after it, so it never idles. On CPU a
*deferred* step detaches in the same way: it is computed only when its tokens are needed. All
members defer it, so none may wait for another before running its own. Results of a step are invalid
once its formation was aborted; collecting them raises `PeerLostError`. Used by the rank's main loop
alone, unless noted otherwise.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Mode
from comm_pool.mixed import Mixed
from coordinator.protocol.messages.rank import TokenBatch, TokenSpan
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.switch_participant import Joined
from coordinator.protocol.terms import Binding, EndCause
from worker.io.host import Host
from worker.io.step_queue import QueueMessage, Step
from worker.rank.engine import Engine, EngineMode, NoRoomError, Plan, TaskOutput
from worker.rank.inflight_step import POLL_S, InflightStep
from worker.rank.led_tasks import LedTasks
from worker.rank.step_log import StepLog

log = structlog.get_logger()

PLANNED_MAX = 4
"""Maximum steps of a pipeline group in flight: the step queue, of six messages, never fills up."""

DEFER_LIMIT_S = 0.01
"""Maximum delay of a deferred step, for peers to leave and for the migration to be planned."""


class StepOwner(Protocol):
    """What steps need from the runtime that owns them."""

    book: LedTasks
    ended: list[TaskEnded]
    host: Host

    @property
    def engine(self) -> Engine:
        """The engine of this rank."""

    @property
    def selected(self) -> EngineMode | None:
        """The mode of the joined group."""

    def lead(self, message: QueueMessage, *, wait_s: float = ...) -> None:
        """Send a message to the followers of the joined group."""

    def freed(self, group: Group) -> None:
        """Note that tasks of a group that this rank has left have ended."""

    def return_outgrown(self, group: Group) -> None:
        """Return tasks that cannot go on in a group, however long they wait."""

    def lose_last_step(self, group: Group) -> None:
        """Give up the detached step of a group that lacks a member."""


class TokenSink(Protocol):
    """What sends tokens to gateways; `TokenPublisher` does."""

    def push(self, reply_to: str, header: TokenBatch, outputs: Sequence[Any]) -> None:
        """Send the outputs of a step's tasks of one gateway, in the order of the header's spans."""


class DeferredStep:
    """A planned step, not yet computed; has the interface of vLLM's asynchronous output on CUDA.

    On CPU the host cannot compute and prepare a switch at once. Streams would pause for the last
    old step, the planning and the first new step in one go. Deferring the last step until the
    manifest is published and the migration is planned splits that into two shorter pauses.
    """

    def __init__(self, compute: Callable[[], Any], binding: Binding, host: Host) -> None:
        """The formation `binding` computes the step."""
        self.binding = binding
        self._compute = compute
        self._is_over = False
        self._host = host
        self._deferred_ns = host.now_ns()
        self.began_ns = 0
        """When its computation began, on the host's monotonic clock; 0 before that."""
        self.copy_event = self
        """Stands for the event of vLLM's output: callers query either one for the tokens."""

    def query(self) -> bool:
        """Return whether the step is over; any thread may call this."""
        return self._is_over

    @property
    def is_late(self) -> bool:
        """Whether the step has waited longer than `DEFER_LIMIT_S`."""
        return self._host.now_ns() - self._deferred_ns > DEFER_LIMIT_S * 1e9

    def get_output(self) -> Any:
        """Compute the step; call once. The step is over even if this raises."""
        self.began_ns = self._host.now_ns()
        try:
            return self._compute()
        finally:
            self._is_over = True


class Steps:
    """Launches steps of the selected mode and collects their tokens."""

    def __init__(self, runtime: StepOwner, incarnation: int, publisher: TokenSink) -> None:
        self._runtime = runtime
        self._now_ns = runtime.host.now_ns
        self._incarnation = incarnation
        self._publisher = publisher
        self._inflight: InflightStep | None = None
        self._draining: tuple[tuple[Joined, Callable[[], bool]], ...] = ()
        self._detached_end_ns: int | None = None
        self._deferred: DeferredStep | None = None
        self._planned: deque[InflightStep] = deque()
        """The steps of a led pipeline group that stages before this rank's compute, oldest first.

        The leader has the last stage: where steps run synchronously, each is a deferred step,
        computed when its turn has come.
        """
        self.count = self.sp_count = 0
        self.log = StepLog()
        self.started_ns = 0
        """When this rank launched its last step, on the host's monotonic clock."""
        self.ended_ns = 0
        """When this rank found the last step over; 0 where only its leader knows."""
        self.ends_ns = 0
        """When the last step that this rank led is expected to end."""
        self.decode_ns = 0
        """Usual duration of a step without prompts; 0 until one has run."""

    @property
    def has_inflight(self) -> bool:
        """Whether a launched step's tokens have not been collected yet."""
        return self._inflight is not None or bool(self._planned)

    @property
    def has_planned(self) -> bool:
        """Whether other stages compute steps of the led pipeline group."""
        return bool(self._planned)

    @property
    def must_end(self) -> bool:
        """Whether steps in flight must end before their group is left.

        Those that other stages of the led pipeline group compute, and one whose loads may be void:
        what becomes of its tasks is known when it is over.
        """
        scheduler = self._inflight.mode.scheduler if self._inflight is not None else None
        return self.has_planned or (scheduler is not None and scheduler.may_be_void)

    @property
    def has_detached_step(self) -> bool:
        """Whether a detached step is in flight."""
        inflight = self._inflight
        return inflight is not None and inflight.mode is not self._runtime.selected

    @property
    def draining_groups(self) -> tuple[Joined, ...]:
        """The groups that the rank has left while the device may still compute in them.

        Other threads may read this.
        """
        return tuple(joined for joined, is_done in self._draining if not is_done())

    def on_leave(self, joined: Joined | None) -> None:
        """Note that the rank leaves this group; its last step may be in flight.

        So may that of a group that it left before: a step ends only once all members are in it.
        """
        draining = tuple(each for each in self._draining if not each[1]())
        if joined is not None:
            deferred = self._deferred
            is_done = self._runtime.engine.done() if deferred is None else deferred.query
            draining += ((joined, is_done),)
        self._draining = draining

    def lead(self, mode: EngineMode, binding: Binding, epoch: int) -> int:
        """Launch one step of the led group and finish the one before; return the time taken in µs.

        Where results come synchronously (CPU), it finishes the step that it launched.
        """
        started_ns = self._now_ns()
        assert mode.scheduler is not None
        self.run_deferred()
        if mode.stages > 1:
            self._lead_stages(mode, binding, epoch)
            return (self._now_ns() - started_ns) // 1000
        times_before = self._inflight.device_times if self._inflight is not None else None
        inflight, host = self._inflight, self._runtime.host
        if inflight is not None and (mode.scheduler.may_be_void or inflight.goes_first(host)):
            self.finish_inflight()
        if mode.scheduler.has_requests():
            plan = mode.plan_step(binding.group, self.finish_inflight)
            if plan.is_empty:
                # The plan only lists ended tasks: collect the in-flight step's tokens first.
                self.finish_inflight()
                self._runtime.return_outgrown(binding.group)
            usual_ns = self._usual_ns(mode, plan)
            if not (plan.is_empty or plan.reads_prompts):
                self.decode_ns = usual_ns
            begins_ns = self.ends_ns if self.has_inflight else 0
            self._expect(max(self._now_ns(), begins_ns) + usual_ns)
            self._runtime.lead(Step(binding.formation, plan))
            result = self.execute(mode, plan)
            group, formation = binding.group, binding.formation
            launched = InflightStep(
                plan, result, self.started_ns, mode, group, epoch, formation, times_before
            )
            before, self._inflight = self._inflight, launched
            if before is not None:
                self._finish(before)
                self._expect(self.ended_ns + usual_ns)
            if not launched.is_asynchronous:
                self.finish_inflight()
        else:
            self.finish_inflight()
        return (self._now_ns() - started_ns) // 1000

    def _lead_stages(self, mode: EngineMode, binding: Binding, epoch: int) -> None:
        """Let all stages have a step to compute, and compute this rank's part of the oldest."""
        scheduler, group = mode.scheduler, binding.group
        assert scheduler is not None
        # Devices with one step more need not wait for this rank between two of them.
        wanted = mode.stages + scheduler.passes_tokens
        while len(self._planned) < min(wanted, PLANNED_MAX) and scheduler.has_more:
            plan = mode.plan_step(group, self.finish_inflight)
            if plan.is_void:
                if not self._planned:
                    self._runtime.return_outgrown(group)
                break
            self._runtime.lead(Step(binding.formation, plan))
            if self._runtime.engine.is_synchronous:
                self._count(plan)
                later = DeferredStep(mode.ready(plan), binding, self._runtime.host)
            else:
                # The device waits for what the stage before gives this one.
                later = self.execute(mode, plan)
            self._planned.append(
                InflightStep(plan, later, self._now_ns(), mode, group, epoch, binding.formation)
            )
        if self._planned:
            self.started_ns = self._now_ns()
            busy = len(self._planned) / mode.stages
            oldest = self._planned.popleft()
            # The newest step has all stages before it.
            self._expect(self.started_ns + mode.stages * self._usual_ns(mode, oldest.plan))
            self._finish(oldest, min(1.0, busy))

    def defer(self, mode: EngineMode, binding: Binding, epoch: int) -> None:
        """Plan and send the last step of the led group before it is left, and defer it."""
        plan = mode.plan_step(binding.group, self.finish_inflight)
        self._runtime.lead(Step(binding.formation, plan, is_held=True))
        deferred = self._defer(mode, plan, binding)
        launched_ns, group = self._now_ns(), binding.group
        self._inflight = InflightStep(
            plan, deferred, launched_ns, mode, group, epoch, binding.formation
        )

    def _defer(self, mode: EngineMode, plan: Plan, binding: Binding) -> DeferredStep:
        # The mode stays selected until the next group is joined, which runs this step first.
        self._deferred = deferred = DeferredStep(mode.ready(plan), binding, self._runtime.host)
        self._count(plan)
        return deferred

    @property
    def has_deferred_step(self) -> bool:
        """Whether a deferred step waits to be computed."""
        return self._deferred is not None and not self._deferred.query()

    @property
    def is_late(self) -> bool:
        """Whether the deferred step has waited for longer than its limit."""
        return self._deferred is not None and self._deferred.is_late

    def run_deferred(self) -> None:
        """Run the deferred step, if there is one.

        Raises `PeerLostError` if its formation was aborted, and `NoRoomError` if it lacked memory,
        unless its group was left.
        """
        deferred, self._deferred = self._deferred, None
        inflight = self._inflight
        if inflight is not None and inflight.result is deferred:
            self.finish_inflight()
        elif deferred is not None and not deferred.query():
            try:
                deferred.get_output()
            except (PeerLostError, NoRoomError) as error:
                if self._runtime.selected is not None:
                    raise
                self._lose(deferred, error)

    def _lose(self, deferred: DeferredStep, error: PeerLostError | NoRoomError) -> None:
        """Give up a deferred step of a group that has lost a member, or has no room for it here."""
        group = deferred.binding.group
        log.warning("deferred_step_lost", group=group.name, reason=str(error))
        if isinstance(error, NoRoomError):
            # The other members wait in it.
            self._runtime.engine.communicators.abort(group.ranks, deferred.binding.formation)
        self._runtime.lose_last_step(group)

    def _usual_ns(self, mode: EngineMode, plan: Plan) -> int:
        """Return the usual time of such steps, or what the start-up benchmark measured."""
        if plan.is_empty:
            return 0  # It only lists ended tasks for the followers.
        seconds = self.log.usual_s(plan, mode.width)
        if seconds is None:
            curve = mode.times.curves.get(plan.mode)
            seconds = curve.us(plan.tokens) / 1e6 if curve is not None else 0.0
        return int(seconds * 1e9)

    def _expect(self, ends_ns: int) -> None:
        self.ends_ns = ends_ns
        engine = self._runtime.engine
        engine.mailboxes[engine.spec.rank].expect_end(ends_ns)

    def execute(self, mode: EngineMode, plan: Plan) -> Any:
        """Launch a step that this rank or its leader planned."""
        self.started_ns = self._now_ns()
        self._count(plan)
        return mode.execute(plan)

    def _count(self, plan: Plan) -> None:
        self.count += 1
        self.sp_count += plan.mode is Mode.SP or isinstance(plan.mode, Mixed)

    def follow(self, mode: EngineMode, step: Step, binding: Binding) -> None:
        """Launch a step that this rank's leader planned; the leader collects its tokens."""
        plan = step.plan
        if self._is_lost(binding.group, binding.formation):
            raise PeerLostError(binding.formation)
        if step.is_held:
            self._defer(mode, plan, binding)
            self.ended_ns = 0
            return
        result = self.execute(mode, plan)
        # On CUDA a follower may have no result to query.
        is_over = (
            self._runtime.engine.is_synchronous and not InflightStep(plan, result).is_asynchronous
        )
        self.ended_ns = self._now_ns() if is_over else 0

    def finish_inflight(self) -> None:
        """Finish the in-flight steps, if any; the led group is then at a safe point.

        Raises `PeerLostError` if their formation was aborted; the step is over even so.
        """
        while self._planned:
            # How many stages have work changes with each, so their times say little.
            self._finish(self._planned.popleft(), busy=0.0)
        inflight, self._inflight = self._inflight, None
        if inflight is None:
            return
        try:
            self._finish(inflight)
        except (PeerLostError, NoRoomError) as error:
            deferred = inflight.result
            if not isinstance(deferred, DeferredStep) or self._runtime.selected is not None:
                raise
            self._lose(deferred, error)

    def drop(self, formation: int) -> None:
        """Wait until the device is done with a formation, and discard its in-flight step."""
        self._planned.clear()
        inflight = self._inflight
        if inflight is not None and inflight.formation != formation:
            self.finish_inflight()  # It is a detached step of another formation.
            inflight = None
        if self.has_deferred_step:
            self._deferred = inflight = None  # Its computation has not begun.
        is_done = self._runtime.engine.done()
        # While the rank is joined to it, the watchdog lets launched work run to its end.
        while not (is_done() and (inflight is None or inflight.is_ready())):
            self._runtime.host.sleep(POLL_S)
        self._inflight = None

    def _is_lost(self, group: Group, formation: int) -> bool:
        communicators = self._runtime.engine.communicators
        return bool(communicators.is_aborted(group.ranks, formation))

    def _counts(self, step: InflightStep) -> bool:
        """Return whether the step's results are valid.

        A detached step may have ended before the loss, so it is valid unless its group was closed.
        """
        if step.group is None:
            return True
        if step.mode is not self._runtime.selected:
            return step.group.ranks not in self._runtime.engine.communicators.closed
        return not self._is_lost(step.group, step.formation)

    def finish_detached_if_ready(self) -> None:
        """Collect the tokens of a detached step, if they are there."""
        inflight = self._inflight
        if self.has_detached_step and inflight is not None and inflight.is_ready():
            self.finish_inflight()

    def take_detached_end_ns(self) -> int | None:
        """Return, once, when the last detached step ended."""
        ended_ns, self._detached_end_ns = self._detached_end_ns, None
        return ended_ns

    def _finish(self, step: InflightStep, busy: float = 1.0) -> None:
        result = step.tokens()
        # Check after reading the tokens: formations are marked before their collectives are
        # unblocked. No caller catches the error of a detached step, so this process ends: tasks may
        # have migrated with its KV.
        if not self._counts(step):
            raise PeerLostError(step.formation)
        mode, now_ns = step.mode, self._now_ns()
        assert mode.scheduler is not None
        self.ended_ns = now_ns
        floor_us = mode.times.floor_us.get(step.plan.mode, 0)
        times = step.began_ns, now_ns, floor_us, step.device_s()
        self.log.ended(step.plan, mode.width, *times, busy=busy)
        frees = mode.scheduler.frees_after_step
        outputs = mode.finish_step(step.plan, result)
        if outputs:
            self._push(outputs, step.epoch)
        if mode is not self._runtime.selected:
            self._detached_end_ns = now_ns
            frees |= any(output.finished for output in outputs)
            if step.group is not None and frees:
                self._runtime.freed(step.group)

    def _push(self, outputs: Sequence[TaskOutput], epoch: int) -> None:
        runtime, book = self._runtime, self._runtime.book
        by_gateway: dict[str, tuple[list[TokenSpan], list[TaskOutput]]] = {}
        for output in outputs:
            led = book.get(output.request_id)
            if led is None:
                continue
            task, reply_to = led.header.task, led.header.reply_to
            if reply_to not in by_gateway:
                by_gateway[reply_to] = [], []
            spans, batch = by_gateway[reply_to]
            finished = output.finished
            spans.append(book.emit(led, len(output.new_token_ids), finished=finished))
            batch.append(output)
            if finished:
                book.close(task, EndCause.FINISHED)
                runtime.ended.append(TaskEnded(task, led.attempt, EndCause.FINISHED, led.emitted))
        for reply_to, (spans, batch) in by_gateway.items():
            header = TokenBatch(runtime.engine.spec.rank, self._incarnation, epoch, tuple(spans))
            self._publisher.push(reply_to, header, batch)

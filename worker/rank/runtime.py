"""What a rank does with its prepared modes: lease pages, lead or follow steps, park, hand back.

`coordinator.protocol.switch_participant` decides when. All calls come from the rank's main loop, at
safe points, so nothing here needs a lock.
"""

from collections.abc import Sequence

import numpy as np
import structlog

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Rank
from coordinator.protocol.messages.rank import Directive, PageReport, Place
from coordinator.protocol.messages.tasks import TaskEnded, TaskReturned
from coordinator.protocol.switch_actions import Leave
from coordinator.protocol.switch_participant import Joined
from coordinator.protocol.terms import Binding, Carry, EndCause, ReturnCause, TaskId
from worker.io.gc_pause import GcPause
from worker.io.host import HOST, Host
from worker.io.step_queue import (
    FOLLOWER_POLL_S,
    LEADER_SEND_LIMIT_S,
    Begin,
    LeaveGroup,
    QueueMessage,
    SetAside,
    Step,
    receive,
    send,
)
from worker.rank.engine import Engine, EngineMode, EngineScheduler
from worker.rank.leases import Leases
from worker.rank.led_tasks import MOVED, LedTask, LedTasks
from worker.rank.migration.migration import Migration
from worker.rank.steps import Steps, TokenSink

log = structlog.get_logger()

TIDY_TASKS = 8
"""Tasks of each group tidied after a step: all of them at once would delay the first new tokens."""


class GroupRuntime:
    """This rank's role in the groups it belongs to; at most one of them is selected."""

    def __init__(
        self, engine: Engine, incarnation: int, publisher: TokenSink, host: Host = HOST
    ) -> None:
        self.engine = engine
        self.host = host
        self.book = LedTasks()
        self.ended: list[TaskEnded] = []
        self.returned: list[TaskReturned] = []
        self.steps = Steps(self, incarnation, publisher)
        self.leases = Leases(self, incarnation)
        self._collector = GcPause(host)
        self.migration = Migration(self, engine.mailboxes, engine.spec.rank)
        self._mode: EngineMode | None = None
        self._binding: Binding | None = None

    # ------------------------------------------------------------------ groups and pages

    @property
    def selected(self) -> EngineMode | None:
        """The mode of the joined group."""
        return self._mode

    def mode_of(self, group: Group) -> EngineMode:
        """Return the mode prepared for a group of this rank."""
        return self.engine.of_width(group.width, group.stages)

    def _led(self, group: Group) -> EngineScheduler:
        scheduler = self.mode_of(group).scheduler
        assert scheduler is not None, "this rank does not lead the group."
        return scheduler

    def join(self, binding: Binding) -> None:
        """Select the binding's prepared objects: two assignments."""
        self.steps.run_deferred()  # A deferred step belongs to the mode selected so far.
        group = binding.group
        self._mode = self.engine.select(group.width, binding.formation, group.stages)
        self._binding = binding
        self.leases.joined(binding)
        self.migration.joined()

    def unbind(self) -> None:
        """Leave the group; its last step may become a detached step."""
        self._collector.pause()
        self.migration.precopy.unbound()
        self.leases.not_joined()
        self._mode = None
        self._binding = None

    def leave(self, leave: Leave, joined: Joined | None) -> None:
        """Leave a group, whose members were as `joined`; its last step may become a detached step.

        A leader parks its tasks and sends the leave message.
        """
        binding = leave.binding
        self.steps.on_leave(joined)
        self.engine.stop_copies()
        self.unbind()
        if leave.is_leader:
            self.park(binding.group, leave.carry, group_lost=leave.group_lost)
            self._send_leave(leave)
        if leave.carry is Carry.RESHARD and not leave.group_lost:
            self.migration.on_leave(binding)
        else:
            self.migration.precopy.forget()

    def _send_leave(self, leave: Leave) -> None:
        binding, group, is_lost = leave.binding, leave.binding.group, leave.group_lost
        wait_s = 0.0 if is_lost else LEADER_SEND_LIMIT_S
        retention = self.leases.retentions.get(group.lease_key)
        has_withdrawn = is_lost or leave.carry is not Carry.RESHARD
        indices = retention.indices if has_withdrawn and retention is not None else None
        try:
            self.tell(group, LeaveGroup(binding.formation, indices), wait_s=wait_s)
        except (TimeoutError, PeerLostError):
            log.warning(
                "leave_not_sent",
                group=group.name,
                reason="its followers do not read their step queue",
            )
        if indices is not None:
            # The followers do the same: the next grant counts the pages that each member has free
            # after it left.
            self.leases.keep_only(group.lease_key, indices)

    def serve(self, binding: Binding, indices: tuple[int, ...], grant_pages: int) -> None:
        """Make the joined group serve: notify its followers, then begin here.

        The coordinator lists the lease `indices` to keep; a migration may have given some up.
        """
        listed = np.array(indices, dtype=np.int64)
        indices = tuple(self.engine.pages.in_use(binding.group.lease_key, listed).tolist())
        retention = self.leases.retentions.get(binding.group.lease_key)
        version = retention.version if retention is not None else -1
        meets = self.migration.meets_in(binding.group)
        self.migration.forget_meeting()  # Only the first group after a migration does.
        self.lead(Begin(binding.formation, indices, grant_pages, version, self.has_tasks, meets))
        self.begin(grant_pages, indices, version, meets=meets)

    def begin(
        self, grant_pages: int, indices: tuple[int, ...], version: int, *, meets: bool = False
    ) -> None:
        """Lease pages for the joined group (dp: own them) and grant them to its scheduler."""
        mode, binding = self._joined()
        self.migration.arrive(mode, meets=meets)
        if self.steps.has_inflight and not self.steps.has_detached_step:
            self.steps.finish_inflight()  # The group was left and joined again within one step.
        granted = self.leases.begin(mode, binding, grant_pages, indices)
        self.leases.began(binding, version)
        if mode.scheduler is not None:
            mode.scheduler.grant(granted)
            mode.inherit()

    def lead(self, message: QueueMessage, *, wait_s: float = LEADER_SEND_LIMIT_S) -> None:
        """Send a message to the followers of the joined group; see `tell`."""
        self.tell(self._joined()[1].group, message, wait_s=wait_s)

    def tell(self, group: Group, message: QueueMessage, *, wait_s: float) -> None:
        """Send a message to the followers of any group that this rank leads; raises as `send`."""
        if group.width > 1:
            pool, queue = self.engine.communicators, self.mode_of(group).queue

            def is_lost() -> bool:
                return pool.is_aborted(group.ranks, message.formation)

            send(queue, message, wait_s, is_lost, self.host)

    def page_report(self) -> PageReport:
        """Return this rank's page counts."""
        now = self.engine.pages.counts()
        return PageReport(now.total, now.free, now.owned, sum(now.leased.values()))

    @property
    def bound_key(self) -> tuple[Rank, ...]:
        """The key of the joined group's lease; empty if there is none."""
        return self._binding.group.lease_key if self._binding is not None else ()

    def _joined(self) -> tuple[EngineMode, Binding]:
        assert self._mode is not None and self._binding is not None, "the rank is in no group."
        return self._mode, self._binding

    # ------------------------------------------------------------------ tasks

    def place(self, place: Place, binding: Binding | None) -> None:
        """Accept a task, or return it if this rank does not lead its group now."""
        header = place.header
        if binding != place.binding or self._mode is None or self._mode.scheduler is None:
            self._give_back(header.task, place.attempt, place.generated_tokens, ReturnCause.STALE)
            return
        led = self.book.get(header.task)
        if led is not None:
            if led.attempt >= place.attempt:
                return  # A repeated message.
            # It came with a move that its gateway has given up since.
            self.drop(header.task, led.attempt)
        generated = list(place.generated_tokens)
        try:
            request = self.engine.intake.request(place.payload)
            self._mode.scheduler.add_task(request, generated, is_promoted=place.is_promoted)
        except Exception:  # Any error of vLLM fails this task alone.
            # The error may quote the request: it is neither logged nor passed on.
            log.exception("task_refused", task=header.task)
            ended = TaskEnded(header.task, place.attempt, EndCause.FAILED, len(generated))
            self.ended.append(ended)
            return
        led = LedTask(
            header=header,
            attempt=place.attempt,
            group=binding.group,
            emitted=len(generated),
            payload=place.payload,
            waited_ms=place.waited_ms,
        )
        self.book.open(led)

    def drop(self, task: TaskId, attempt: int) -> None:
        """Free everything of a task, if it is at this attempt or an older one."""
        self.steps.finish_inflight()
        led = self.book.get(task)
        if led is not None and led.attempt <= attempt:
            self.book.close(task, EndCause.CANCELLED)
            if self._led(led.group).take_back([task]):
                self._withdraw_if_parked(led.group)
            self.ended.append(TaskEnded(task, led.attempt, EndCause.CANCELLED, led.emitted))

    def give_back(self, task: TaskId) -> None:
        """Free a task's KV and return the task to the pool."""
        self.steps.finish_inflight()
        led = self.book.get(task)
        if led is not None:
            self.give_up(led.group, [task], ReturnCause.RECOMPUTE)

    def park(self, group: Group, carry: Carry, *, group_lost: bool) -> None:
        """Apply the carry plan to the tasks of a group that this rank leads, then withdraw pages.

        With `reshard` the running tasks and their pages stay for the migration.
        """
        scheduler = self._led(group)
        if carry is Carry.RESHARD and not group_lost:
            # Pages stay as they are, including prefixes cached in free ones.
            self.give_up(group, scheduler.not_holding(), ReturnCause.NOT_STARTED, keeps_pages=True)
            self.give_up(group, scheduler.not_movable(), ReturnCause.RECOMPUTE, keeps_pages=True)
            return
        self.give_up(group, scheduler.not_holding(), ReturnCause.NOT_STARTED)
        if group_lost or carry is not Carry.PAUSE:
            self.give_up(group, scheduler.holding(), ReturnCause.RECOMPUTE)
        self.leases.withdraw(group)

    def hand_over(self, group: Group, tasks: Sequence[str]) -> None:
        """Forget tasks that another leader continues."""
        self._led(group).leave_to_others(tasks)
        for name in tasks:
            self.book.close(TaskId(name), MOVED)

    def look(self) -> None:
        """Do what time alone brings: tokens of a detached step, the end of a GC pause or rescue."""
        self.migration.look()
        self.leases.look()
        self._collector.look()
        self.engine.give_host_pages()

    def tidy(self) -> None:
        """Do all work that a switch has put off: there is no step to lead or to follow."""
        self._tidy(None)
        self._collector.resume()

    def tidy_some(self) -> None:
        """Do a part of that work after a step, and the rest after others."""
        if self._tidy(TIDY_TASKS):
            self._collector.resume_soon()

    def _tidy(self, most: int | None) -> bool:
        schedulers = (mode.scheduler for mode in self.engine.modes.values())
        are_done = [each.tidy(most) for each in schedulers if each is not None]
        return all(are_done)

    def give_up(
        self, group: Group, tasks: Sequence[str], cause: ReturnCause, *, keeps_pages: bool = False
    ) -> None:
        """Return tasks to the pool with their tokens; a parked group then releases pages."""
        returned = self._led(group).take_back(tasks)
        for name, generated in returned.items():
            led = self.book.close(TaskId(name), cause)
            if led is not None:
                self._give_back(led.header.task, led.attempt, tuple(generated), cause)
        if returned and not keeps_pages:
            self._withdraw_if_parked(group)

    def return_outgrown(self, group: Group) -> None:
        """Return tasks that cannot go on in a group, however long they wait.

        They need pages that others held when it was formed. The pool places them where they fit.
        """
        if outgrown := self._led(group).outgrown():
            log.info("tasks_outgrown", group=group.name, tasks=outgrown)
            self.give_up(group, outgrown, ReturnCause.RECOMPUTE)

    def freed(self, group: Group) -> None:
        """Release the pages of tasks that ended after the rank left their group."""
        if self.migration.key != group.lease_key:
            self._withdraw_if_parked(group)

    def _withdraw_if_parked(self, group: Group) -> None:
        if self.bound_key != group.lease_key and not self.leases.is_prepared(group):
            self.leases.withdraw(group)

    def _give_back(
        self, task: TaskId, attempt: int, generated: tuple[int, ...], cause: ReturnCause
    ) -> None:
        self.returned.append(TaskReturned(task, attempt, cause, generated))

    # ------------------------------------------------------------------ steps

    @property
    def has_tasks(self) -> bool:
        """Whether the led group has unfinished tasks."""
        scheduler = self._mode.scheduler if self._mode is not None else None
        return scheduler is not None and not scheduler.idle

    @property
    def has_work(self) -> bool:
        """Whether the led group has a step to run."""
        scheduler = self._mode.scheduler if self._mode is not None else None
        has_inflight = self.steps.has_inflight and not self.steps.has_detached_step
        return has_inflight or bool(scheduler and scheduler.has_requests())

    def defer_step(self, epoch: int) -> None:
        """Plan the last step of the led group and let all members defer it; see `Steps.defer`."""
        mode, binding = self._joined()
        self.steps.defer(mode, binding, epoch)

    def copy_early(self, directive: Directive) -> bool:
        """Copy some KV for a switch while the joined group serves; see `PreCopy.advance`."""
        return self.migration.precopy.advance(directive, self._joined()[1])

    def forget_steps(self, binding: Binding) -> None:
        """Drop the runner's state of the formation's tasks: its last step never ends."""
        self.steps.drop(binding.formation)
        self.mode_of(binding.group).forget_steps()

    def lose_last_step(self, group: Group) -> None:
        """Give up the detached step, which a lost member will never finish.

        The published state of its tasks is stale, so the tasks are recomputed.
        """
        mode = self.mode_of(group)
        mode.forget_steps()
        self.migration.lose()
        if mode.scheduler is not None:
            self.give_up(group, list(mode.scheduler.requests), ReturnCause.RECOMPUTE)

    def lead_step(self, epoch: int) -> int:
        """Launch one step of the led group; see `Steps.lead`."""
        mode, binding = self._joined()
        return self.steps.lead(mode, binding, epoch)

    def follow(self, binding: Binding, *, wait_s: float = FOLLOWER_POLL_S) -> QueueMessage | None:
        """Read one message of the joined group and obey it; the caller handles leave messages."""
        mode, _ = self._joined()
        message = receive(mode.queue, wait_s)
        if message is None and self.steps.is_late:
            self.steps.run_deferred()  # Its leader has not left and waits in this step.
        if message is None or message.formation != binding.formation:
            return message if isinstance(message, LeaveGroup) else None
        if not isinstance(message, LeaveGroup):
            self.steps.run_deferred()
        match message:
            case Begin(lease_indices=indices, grant_pages=pages, version=version, meets=meets):
                self.begin(pages, indices, version, meets=meets)
            case Step():
                self.steps.follow(mode, message, binding)
            case SetAside():
                self.migration.precopy.hear(message)
            case LeaveGroup(lease_indices=indices):
                if indices is not None:
                    # The coordinator sends this too, but later.
                    self.leases.keep_only(binding.group.lease_key, indices)
        return message

    def drain_queues(self) -> list[int]:
        """Empty all queues while parked; return the formations of the leave messages."""
        formations: list[int] = []
        for mode in self.engine.modes.values():
            if mode.is_leader:
                continue
            while (message := receive(mode.queue, 0.0)) is not None:
                if isinstance(message, LeaveGroup):
                    formations.append(message.formation)
        return formations

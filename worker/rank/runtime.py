"""What a rank does with its prepared modes: lease pages, lead or follow steps, park, hand back.

Thin: when to do what is decided by `coordinator.protocol.switch_participant`. All calls come from
the rank's main loop, at safe points, so nothing here needs a lock.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from comm_pool.layout import Group, Mode
from coordinator.protocol.messages.rank import LeaseRetention, PageReport, Place
from coordinator.protocol.messages.tasks import TaskEnded, TaskReturned
from coordinator.protocol.terms import Binding, Carry, EndCause, ReturnCause, TaskId
from kvadaptor.pages import without
from worker.engine.codec import RequestCodec
from worker.engine.mode import PreparedMode
from worker.engine.rank_engine import RankEngine
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.io.gc_pause import GcPause
from worker.io.step_queue import (
    FOLLOWER_POLL_S,
    LEADER_SEND_LIMIT_S,
    Begin,
    LeaveGroup,
    QueueMessage,
    Step,
    receive,
    send,
)
from worker.io.token_publisher import TokenPublisher
from worker.rank.led_tasks import MOVED, LedTask, LedTasks
from worker.rank.migration.migration import Migration
from worker.rank.steps import Steps

log = structlog.get_logger()

VERSIONS_PER_INCARNATION = 1 << 32
"""Lease versions grow over restarts of a leader: its incarnation is their high part."""


class GroupRuntime:
    """This rank's part in the groups it belongs to, one of which is selected at a time."""

    def __init__(self, engine: RankEngine, incarnation: int, publisher: TokenPublisher) -> None:
        self.engine = engine
        self.book = LedTasks()
        self.ended: list[TaskEnded] = []
        self.returned: list[TaskReturned] = []
        self.kept: dict[tuple[int, ...], LeaseRetention] = {}
        self.intake = RequestCodec(engine.block_hasher, engine.structured_output)
        self.steps = Steps(self, incarnation, publisher)
        self._lease_version = incarnation * VERSIONS_PER_INCARNATION
        self._applied_kept: dict[tuple[int, ...], tuple[int, int]] = {}
        self._formed: dict[tuple[int, ...], int] = {}
        self._moved_in: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Lease indices that hold moved tasks of a group, until it begins."""
        self._collector = GcPause()
        self.migration = Migration(self, engine.mailboxes, engine.spec.rank)
        self._mode: PreparedMode | None = None
        self._binding: Binding | None = None

    # ------------------------------------------------------------------ groups and pages

    @property
    def selected(self) -> PreparedMode | None:
        """The mode of the joined group."""
        return self._mode

    def mode_of(self, group: Group) -> PreparedMode:
        """What is prepared for a group of this rank."""
        return self.engine.of_width(group.width)

    def _led(self, group: Group) -> ModeScheduler:
        scheduler = self.mode_of(group).scheduler
        assert scheduler is not None, "this rank does not lead the group."
        return scheduler

    def join(self, binding: Binding) -> None:
        """Select the binding's prepared objects: two assignments."""
        self.steps.catch_up()  # What is held belongs to what is selected until now.
        self._mode = self.engine.select(binding.group.width, binding.formation)
        self._binding = binding
        self._formed[binding.group.ranks] = binding.formation
        self.migration.joined()

    def prepared(self, binding: Binding, indices: npt.NDArray[np.int64]) -> None:
        """A move has leased these indices to a group that is to be joined."""
        ranks = binding.group.ranks
        self._formed[ranks] = binding.formation
        self._moved_in[ranks] = tuple(indices.tolist())
        self._applied_kept[ranks] = (binding.formation, -1)

    def not_joined(self) -> None:
        """What was prepared for a group is not joined now: its leader says what is kept of it."""
        self._moved_in.clear()

    def unbind(self) -> None:
        """Belong to no group; a step of the one that is left may be under way."""
        self._collector.pause()
        self.not_joined()
        self._mode = None
        self._binding = None

    def serve(self, binding: Binding, kept: tuple[int, ...], grant_pages: int) -> None:
        """Tell the followers of the joined group that it serves, and let it.

        Of what is `kept` by the coordinator's word a move may have given up more meanwhile.
        """
        held = set(self.engine.pages.lease_indices(binding.group.ranks).tolist())
        kept = tuple(index for index in kept if index in held)
        told = self.kept.get(binding.group.ranks)
        version = told.version if told is not None else -1
        meets = self.migration.meets_in(binding.group)
        self.lead(Begin(binding.formation, kept, grant_pages, version, self.has_tasks, meets))
        self.begin(grant_pages, kept, version, meets=meets)

    def begin(
        self, grant_pages: int, kept: tuple[int, ...], version: int, *, meets: bool = False
    ) -> None:
        """Lease pages for the joined group (dp: own them) and let its scheduler use them."""
        mode, group = self._joined()
        self.migration.arrive(mode, meets=meets)
        if self.steps.has_inflight and not self.steps.trails:
            self.steps.settle()  # It was left and is joined again, all within one step.
        pool = self.engine.pages
        if group.mode is Mode.DP:
            pool.grant_own_pages(grant_pages)
            indices = pool.own_pages()
        else:
            assert mode.table is not None
            kept = (*kept, *self._moved_in.pop(group.ranks, ()))
            is_held = set(kept) <= set(pool.lease_indices(group.ranks).tolist())
            assert is_held, "tasks hold pages that this rank has given up."
            self.keep_only(group.ranks, kept)
            mode.table.map(*pool.lease_pages(group.ranks, grant_pages))
            indices = pool.lease_indices(group.ranks)
        if self._binding is not None:
            self._applied_kept[group.ranks] = (self._binding.formation, version)
        if mode.scheduler is not None:
            mode.scheduler.grant(indices)

    def lead(self, message: QueueMessage, *, wait_s: float = LEADER_SEND_LIMIT_S) -> None:
        """See `tell`, of the joined group."""
        self.tell(self._joined()[1], message, wait_s=wait_s)

    def tell(self, group: Group, message: QueueMessage, *, wait_s: float) -> None:
        """Tell the followers of any group that this rank leads; raises as `send` does."""
        if group.width > 1:
            pool = self.engine.communicators
            queue = pool.of(group.ranks).group.mq_broadcaster
            send(queue, message, wait_s, lambda: pool.is_aborted(group.ranks, message.formation))

    def apply_kept(self, leases: Iterable[LeaseRetention]) -> bool:
        """Free the pages of unbound groups that their leaders no longer need; True if any were."""
        changed, bound = False, self._binding.group.ranks if self._binding is not None else ()
        for lease in leases:
            order = (lease.formation, lease.version)
            # It says nothing of pages leased since; and what was told of a move has to stay true.
            is_old = self._applied_kept.get(lease.ranks, (-1, -1)) >= order
            if is_old or lease.ranks in (bound, self.migration.told_ranks, self.migration.goal):
                continue
            self._applied_kept[lease.ranks] = order
            changed |= self.keep_only(lease.ranks, lease.indices)
        return changed

    def keep_only(self, ranks: tuple[int, ...], kept: Sequence[int]) -> bool:
        """Free all other pages of a group's lease; True if there were any."""
        pool = self.engine.pages
        leased = pool.lease_indices(ranks)
        dropped = without(leased, np.array(kept, dtype=np.int64))
        if not dropped.size:
            return False
        self.migration.gave_up(ranks)
        mode = next(m for m in self.engine.modes.values() if m.communicator.ranks == ranks)
        assert mode.table is not None
        if mode.scheduler is not None and (lost := mode.scheduler.holders_of(dropped)):
            # A member's share of these pages is lost: the coordinator says so, and it is right.
            group = Group(mode.communicator.ranks, mode.key.mode)
            self.give_up(group, lost, ReturnCause.RECOMPUTE)
        mode.table.unmap(dropped)
        pool.keep_only(ranks, without(leased, dropped).tolist())
        return True

    def page_report(self) -> PageReport:
        """Where this rank's pages are."""
        now = self.engine.pages.counts()
        return PageReport(now.total, now.free, now.owned, sum(now.leased.values()))

    def _joined(self) -> tuple[PreparedMode, Group]:
        assert self._mode is not None and self._binding is not None, "the rank is in no group."
        return self._mode, self._binding.group

    # ------------------------------------------------------------------ tasks

    def place(self, place: Place, binding: Binding | None) -> None:
        """Take a task, or return it if its group is not the one that this rank leads now."""
        header = place.header
        if binding != place.binding or self._mode is None or self._mode.scheduler is None:
            self._give_back(header.task, place.attempt, place.generated_tokens, ReturnCause.STALE)
            return
        if self.book.get(header.task) is not None:
            return  # A repetition.
        generated = list(place.generated_tokens)
        try:
            self._mode.scheduler.add_task(self.intake.request(place.payload), generated)
        except Exception:  # Whatever vLLM finds wrong is this task's failure alone.
            # Its words may quote the request: they are neither logged nor passed on.
            log.exception("task_refused", task=header.task)
            ended = TaskEnded(header.task, place.attempt, EndCause.FAILED, len(generated))
            self.ended.append(ended)
            return
        what = (header, place.attempt, binding.group, len(generated), place.payload)
        self.book.open(LedTask(*what, place.waited_ms))

    def drop(self, task: TaskId, attempt: int) -> None:
        """Free everything of a task, if it is this attempt or an older one."""
        self.steps.settle()
        led = self.book.get(task)
        if led is not None and led.attempt <= attempt:
            self.book.close(task, EndCause.CANCELLED)
            if self._led(led.group).take_back([task]):
                self._withdraw_if_parked(led.group)
            self.ended.append(TaskEnded(task, led.attempt, EndCause.CANCELLED, led.emitted))

    def give_back(self, task: TaskId) -> None:
        """Free a task's KV and return it to the pool."""
        self.steps.settle()
        led = self.book.get(task)
        if led is not None:
            self.give_up(led.group, [task], ReturnCause.RECOMPUTE)

    def park(self, group: Group, carry: Carry, *, group_lost: bool) -> None:
        """Apply the carry plan to the tasks of a group that this rank leads, then withdraw pages.

        With `reshard` the running tasks wait where they are for the move.
        """
        scheduler = self._led(group)
        if carry is Carry.RESHARD and not group_lost:
            # Pages stay as they are, and with them what is cached in free ones.
            self.give_up(group, scheduler.not_holding(), ReturnCause.NOT_STARTED, keeps_pages=True)
            self.give_up(group, scheduler.not_movable(), ReturnCause.RECOMPUTE, keeps_pages=True)
            return
        self.give_up(group, scheduler.not_holding(), ReturnCause.NOT_STARTED)
        if group_lost or carry is not Carry.PAUSE:
            self.give_up(group, scheduler.holding(), ReturnCause.RECOMPUTE)
        self.withdraw(group)

    def hand_over(self, group: Group, tasks: Sequence[str]) -> None:
        """Forget tasks that another leader goes on with."""
        self._led(group).leave_to_others(tasks)
        for name in tasks:
            self.book.close(TaskId(name), MOVED)

    def look(self) -> None:
        """Take what has come by itself: tokens of a step that trails, the end of a long pause."""
        self.migration.look()
        self._collector.look()

    def tidy(self) -> None:
        """Do what a switch has put off."""
        self._collector.resume()
        for mode in self.engine.modes.values():
            if mode.scheduler is not None:
                mode.scheduler.tidy()

    def withdraw(self, group: Group) -> None:
        """Let go of the pages of a parked group that no task holds; a wide group tells which."""
        held, pool = self._led(group).withdraw(), self.engine.pages
        if group.mode is Mode.DP:
            pool.return_own(without(pool.own_pages(), held))
            return
        self._lease_version += 1
        formation = self._formed[group.ranks]
        kept = LeaseRetention(group.ranks, self._lease_version, tuple(held.tolist()), formation)
        self.kept[group.ranks] = kept

    def give_up(
        self, group: Group, tasks: Sequence[str], cause: ReturnCause, *, keeps_pages: bool = False
    ) -> None:
        """Return tasks to the pool, with the tokens they have; a parked group gives up pages."""
        returned = self._led(group).take_back(tasks)
        for name, generated in returned.items():
            led = self.book.close(TaskId(name), cause)
            if led is not None:
                self._give_back(led.header.task, led.attempt, tuple(generated), cause)
        if returned and not keeps_pages:
            self._withdraw_if_parked(group)

    def freed(self, group: Group) -> None:
        """Tasks of a group that was left have ended behind its back."""
        if self.migration.ranks != group.ranks:
            self._withdraw_if_parked(group)

    def _withdraw_if_parked(self, group: Group) -> None:
        if self._binding is None or self._binding.group.ranks != group.ranks:
            self.withdraw(group)

    def _give_back(
        self, task: TaskId, attempt: int, generated: tuple[int, ...], cause: ReturnCause
    ) -> None:
        self.returned.append(TaskReturned(task, attempt, cause, generated))

    # ------------------------------------------------------------------ steps

    @property
    def has_tasks(self) -> bool:
        """Whether the led group has tasks to go on with."""
        scheduler = self._mode.scheduler if self._mode is not None else None
        return scheduler is not None and not scheduler.idle

    @property
    def has_work(self) -> bool:
        """Whether the led group has a step to run."""
        scheduler = self._mode.scheduler if self._mode is not None else None
        has_inflight = self.steps.has_inflight and not self.steps.trails
        return has_inflight or bool(scheduler and scheduler.has_requests())

    def hold_step(self, epoch: int) -> None:
        """Plan the last step of the led group, for all to hold it; see `Steps.hold`."""
        mode, _ = self._joined()
        assert self._binding is not None
        self.steps.hold(mode, self._binding, epoch)

    def lose_last_step(self, group: Group) -> None:
        """The last step of a group that was left will never be over: it lacks a member.

        What was told of its tasks is not true, and they are computed again.
        """
        mode = self.mode_of(group)
        mode.runner.forget_tasks()
        self.migration.lose()
        if mode.scheduler is not None:
            mode.scheduler.forget_steps()
            self.give_up(group, list(mode.scheduler.requests), ReturnCause.RECOMPUTE)

    def lead_step(self, epoch: int) -> int:
        """Launch one step of the led group; see `Steps.lead`."""
        mode, _ = self._joined()
        assert self._binding is not None
        return self.steps.lead(mode, self._binding, epoch)

    def follow(self, binding: Binding, *, wait_s: float = FOLLOWER_POLL_S) -> QueueMessage | None:
        """Read one message of the joined group and obey it; leave messages are the caller's."""
        mode, _ = self._joined()
        message = receive(mode.communicator.group.mq_broadcaster, wait_s)
        if message is None and self.steps.is_late:
            self.steps.catch_up()  # Its leader has not left after all, and waits in it.
        if message is None or message.formation != binding.formation:
            return message if isinstance(message, LeaveGroup) else None
        if not isinstance(message, LeaveGroup):
            self.steps.catch_up()
        match message:
            case Begin(kept=kept, grant_pages=pages, version=version, meets=meets):
                self.begin(pages, kept, version, meets=meets)
            case Step():
                self.steps.follow(mode, message, binding)
            case LeaveGroup(kept=kept):
                if kept is not None:
                    # The coordinator tells it too, but later.
                    self.keep_only(binding.group.ranks, kept)
        return message

    def drain_queues(self) -> list[int]:
        """While parked: empty all queues; returns the formations of leave messages."""
        left: list[int] = []
        for communicator in self.engine.communicators:
            if communicator.width == 1 or communicator.rank_in_group == 0:
                continue
            while (message := receive(communicator.group.mq_broadcaster, 0.0)) is not None:
                if isinstance(message, LeaveGroup):
                    left.append(message.formation)
        return left

"""Copies full blocks of running tasks to where a switch wants them, while their groups serve.

Full blocks never change, so what is copied stays true until the task loses its blocks. In each
round that the coordinator orders, a rank publishes what its group runs, waits for its peers, and
pulls what it will need into pages that its leader has set aside. A rank that will lead also builds
the requests of its tasks. The migration that follows plans
from what each rank holds by then, so an unfinished or lost round costs nothing but time. Used by
the rank's main loop alone, at safe points. Reading manifests and planning take longer than a step,
so on CUDA a thread of its own does that.
"""

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, PreCopyOrder, PreCopyProgress
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, Target
from kvadaptor.geometry import Split
from kvadaptor.reshard.early import EarlyPlan
from kvadaptor.reshard.order import UnitOrder
from kvadaptor.reshard.terms import ReshardError
from kvadaptor.transfer.mailbox import MailboxFullError, RankMailbox
from kvadaptor.transfer.rounds import MoveError, by_source
from worker.io.step_queue import SetAside
from worker.rank.engine import EngineScheduler
from worker.rank.migration.copy_thread import AtOnce, CopyThread
from worker.rank.migration.early_copy import EarlyCopy
from worker.rank.migration.early_plan import EarlyShare, plan_early_copies
from worker.rank.migration.early_requests import EarlyRequests, without_payloads
from worker.rank.migration.manifest import Ints, Manifest, manifest_of
from worker.rank.migration.plan_ahead import MigrationPlanner, changing_ranks
from worker.rank.runtime_protocol import Runtime

log = structlog.get_logger()

STEP_BYTES = 512 << 10
"""KV copied between two steps where copies and steps share the processor."""

BESIDE_BYTES = 128 << 20
"""KV copied at a time where copies run beside steps: less than 0.5 ms over NVLink."""

STEP_REQUESTS = 2
"""Requests built between two steps, likewise: about 0.2 ms each."""

BESIDE_REQUESTS = 16
"""Requests built at a time while steps run on a device."""

ASIDE_PAGES = 256
"""Pages set aside between two steps: about 1 ms, where all pages of a device are up to 50 ms."""

ASIDE_PASSES_MAX = 16
"""More pages are set aside at once where these would take longer: rounds end after 2 s."""

DRAFT_TOKENS = 32
"""Tokens for which tasks get blocks before the plan is drafted: it holds for as many steps.

Reading and planning take several of them.
"""

ORDER_LIMIT_S = 5.0
"""A rank whose orders end for this long gives pages back: its coordinator may be gone."""

ROUNDS_PER_EPOCH = 1 << 10
"""Rounds of an epoch, at most; mailboxes number rounds below 0, and migrations above."""

_NO_INDICES: Ints = np.zeros(0, dtype=np.int64)
_NOTHING_ASIDE = 0, 0, _NO_INDICES

POLL_S = 0.0001
"""How often a rank looks whether its copies are over."""


class PreCopy:
    """The early copies of one rank for one switch at a time."""

    def __init__(
        self,
        runtime: Runtime,
        planner: MigrationPlanner,
        mailboxes: Mapping[Rank, RankMailbox],
        rank: Rank,
        copies: CopyThread,
        end_migration: Callable[[], None],
    ) -> None:
        """`end_migration` waits for copies of the last migration."""
        self._runtime = runtime
        self._planner = planner
        self._mailboxes = mailboxes
        self._rank = rank
        self._copies = copies
        self._end_migration = end_migration
        is_inline = runtime.engine.is_synchronous
        self._thread = AtOnce() if is_inline else runtime.host.thread("plan")
        """Reads and plans; copies never wait for that."""
        self.progress: PreCopyProgress | None = None
        """What the coordinator hears of it."""
        self._binding: Binding | None = None
        """The serving group whose pages are set aside."""
        self._order: tuple[int, int] = (0, 0)
        """The epoch and the round that this rank works on, or has finished."""
        self._began_ns = 0
        self._is_done = True
        self._is_published = False
        self._grant: int | None = None
        """How many pages this leader is to set aside in all; None: it has set aside what it can."""
        self._is_settled: Callable[[], bool] = lambda: True
        """Whether the device has computed all steps before pages were set aside."""
        self._aside: tuple[int, int, Ints] = _NOTHING_ASIDE
        """The epoch and the round for which its leader set lease indices aside, and these."""
        self._aim: tuple[Target, bool] | None = None
        """Where the round is to lead, and whether it drafts the plan for that."""
        self._work: Future[Any] | None = None
        """What the thread computes for this round."""
        self._manifests: dict[int, Manifest] | None = None
        """What all ranks that change their group have published in this round, once it is read."""
        self._plan: EarlyPlan | None = None
        self._planned: Mapping[str, EarlyCopy] = {}
        self._next = self._copied = 0
        """Blocks of the plan whose copies have begun, and that are copied."""
        self._held: dict[tuple[str, int, int, int, int], EarlyCopy] = {}
        """What is copied, by its key."""
        self._sent: set[tuple[str, int]] = set()
        """The (task, attempt) whose payloads this leader has published for this switch."""
        self.requests = EarlyRequests(runtime.engine)
        """The requests of tasks that this rank will lead."""

    @property
    def epoch(self) -> int:
        """The epoch of the switch for which it copies or has copied; 0 is none."""
        return self._order[0]

    @property
    def is_busy(self) -> bool:
        """Whether a round is under way."""
        return not self._is_done

    def concerns(self, participant: SwitchParticipant) -> bool:
        """Return whether this rank is to copy while its group serves, or has copied."""
        return participant.precopy is not None or self.epoch > 0

    # ------------------------------------------------------------------ rounds

    def advance(self, directive: Directive, binding: Binding) -> bool:
        """Do the next bit of the round that the directive orders; return whether one has ended.

        Raises `PeerLostError` and TimeoutError if followers do not read their queue.
        """
        order = directive.precopy
        assert order is not None
        epoch, host = directive.stage.epoch, self._runtime.host
        if epoch != self.epoch:
            self.end()
            self._began_ns = host.now_ns()
        if (epoch, order.round) > self._order:
            self._stop()
            self._begin((epoch, order.round), binding, order)
        elif self._binding is not None and host.now_ns() - self._began_ns > ORDER_LIMIT_S * 1e9:
            log.warning("precopy_too_long", epoch=epoch, advice="pages go back to running tasks")
            self._give_back()
        if self._is_done:
            return False
        if (aim := (directive.target, order.drafts)) != self._aim:
            # Another coordinator may want something else of the same round.
            self._aim = aim
            self._drop_work()
        # One thing between two steps, so that none of them waits for all.
        if not self._is_published:
            self._publish(binding, drafts=order.drafts)
        elif self._manifests is None and (order.drafts or self._plan is None):
            self._read_all(directive)
        elif order.drafts:
            self._find_draft(directive)
        elif self._plan is None:
            self._find_plan(directive)
        elif not self.requests.is_complete:
            is_beside = not self._runtime.engine.is_synchronous
            self.requests.build(BESIDE_REQUESTS if is_beside else STEP_REQUESTS)
        elif self._copy_next():
            self._finish_round()
        return self._is_done

    def _begin(self, number: tuple[int, int], binding: Binding, order: PreCopyOrder) -> None:
        """Begin a round."""
        self._order, self._binding = number, binding
        self._is_done = self._is_published = False
        # A peer that reads the manifest looks for KV where copies of the last migration may write.
        self._end_migration()
        if self._runtime.mode_of(binding.group).scheduler is not None:
            granted = {each.ranks: each.pages for each in order.grants}
            self._grant = granted.get(binding.group.ranks, 0)

    def _set_aside(self, binding: Binding, *, drafts: bool) -> None:
        """Set the next pages aside as a leader; followers hear of all of them at once."""
        scheduler, pages = self._runtime.mode_of(binding.group).scheduler, self._grant
        assert scheduler is not None
        assert pages is not None
        at_once = max(ASIDE_PAGES, -(-pages // ASIDE_PASSES_MAX))
        wanted = min(pages, scheduler.set_aside(0).size + at_once)
        indices = scheduler.set_aside(wanted)
        if indices.size == wanted < pages:
            return
        self._grant = None
        self._runtime.lead(SetAside(binding.formation, *self._order, (*indices.tolist(),)))
        self._aside = *self._order, indices
        self._is_settled = self._looks_ahead(scheduler) if drafts else lambda: True

    def _publish(self, binding: Binding, *, drafts: bool) -> None:
        """Publish what the group runs, once its leader has set pages aside.

        A follower does so when it has computed all that its leader had when it set pages aside: its
        KV is then there for all blocks that are full in the leader's manifest.
        """
        if self._grant is not None:
            self._set_aside(binding, drafts=drafts)
        if self._aside[:2] != self._order or not self._is_settled():
            return
        scheduler = self._runtime.mode_of(binding.group).scheduler
        if scheduler is not None:
            scheduler.look_ahead(0)
        manifest = manifest_of(
            self._runtime,
            self._rank,
            binding.group,
            binding.formation,
            self.held(self.epoch),
            is_serving=not drafts,
        )
        self._is_published = True
        try:
            message = pickle.dumps(without_payloads(manifest, self._sent), protocol=5)
            self._mailboxes[self._rank].publish(_key(self._order), message)
        except MailboxFullError as error:
            log.warning("precopy_too_large", reason=str(error), advice="more moves at the switch")
        else:
            self._sent |= {(each.state.task, each.attempt) for each in manifest.cargo}

    def _looks_ahead(self, scheduler: EngineScheduler) -> Callable[[], bool]:
        """Let tasks get blocks in advance; return a query for whether they have got them."""
        steps, count = self._runtime.steps, self._runtime.steps.count
        scheduler.look_ahead(DRAFT_TOKENS)
        return lambda: steps.count > count or not scheduler.get_request_counts()[0]

    def hear(self, message: SetAside) -> None:
        """Take in what the leader of this group has set aside, or gives back to its tasks."""
        if message.lease_indices is None:
            self.forget()
            self._aside = _NOTHING_ASIDE
        else:
            indices = np.array(message.lease_indices, dtype=np.int64)
            self._aside = message.epoch, message.round, indices
            self._runtime.engine.order_copies()
            self._is_settled = self._runtime.engine.done()

    def _messages(self, directive: Directive) -> dict[int, bytes] | None:
        """Return what each rank that changes its group has published in this round.

        None: some have not.
        """
        changing = changing_ranks(directive.target, directive.stage.epoch)
        messages: dict[int, bytes] = {}
        for rank in self._planner.peers(directive, changing):
            mailbox, key = self._mailboxes[rank], _key(self._order)
            is_there = mailbox.epoch == key
            messages[rank] = mailbox.message if is_there else b""
            if not is_there or mailbox.epoch != key:
                return None  # Not there yet, or replaced while it was read.
        return messages

    def _read_all(self, directive: Directive) -> None:
        """Read what all ranks that change their group have published, once it is there."""
        if self._work is None:
            messages = self._messages(directive)
            if messages is None:
                return
            self._work = self._thread.submit(lambda: _read(messages))
        if (read := self._take_work()) is not None:
            self._manifests = found = read.result()
            self.requests.learn(found.values())

    def _take_work(self) -> Future[Any] | None:
        """Return what the thread has computed; None: it is not done."""
        assert self._work is not None
        if not self._work.done():
            return None
        done, self._work = self._work, None
        return done

    def _find_draft(self, directive: Directive) -> None:
        """Draft the plan of the switch from what has been read."""
        planner, order, target = self._planner, self._order, directive.target
        assert self._manifests is not None
        if self._rank not in self._manifests:
            self._finish_round()
            return
        if self._work is None:
            try:
                completed = self.requests.completed
                known = {rank: completed(each) for rank, each in self._manifests.items()}
            except KeyError as error:
                # The round never ends, so no rank relies on what this one does not know.
                reason = f"no payload of {error}"
                log.warning("precopy_not_drafted", epoch=self.epoch, reason=reason)
                self._is_done, self._manifests = True, None
                return
            planner.remember(*order, known)
            self._work = self._thread.submit(lambda: planner.draft(*order, known, target))
        if (drafted := self._take_work()) is None:
            return
        try:
            planner.keep(drafted.result())
        except Exception:
            # The migration itself will fail likewise and report it.
            log.warning("precopy_not_drafted", epoch=self.epoch, exc_info=True)
        self._finish_round()

    def _find_plan(self, directive: Directive) -> None:
        """Plan this round from what has been read."""
        manifests, engine = self._manifests, self._runtime.engine
        assert manifests is not None
        found = None
        if self._rank in manifests and engine.mover.is_one_sided:
            if self._work is None:
                given = manifests, directive.target, engine.kv.geometry, self._spare()
                call = partial(plan_early_copies, self._rank, *given)
                self._work = self._thread.submit(call)
            if (planned := self._take_work()) is None:
                return
            try:
                found = planned.result()
            except ReshardError as error:
                epoch = directive.stage.epoch
                log.warning("precopy_not_planned", epoch=epoch, reason=str(error))
        found = found or EarlyShare(_nothing(self._rank), {}, ())
        self._next = self._copied = 0
        self._plan, self._planned, self._manifests = found.copies, found.held, None
        self.requests.expect(found.led)

    def _spare(self) -> Ints:
        """Return the pages of this rank that no task of any group gets."""
        pool, binding, indices = self._runtime.engine.pages, self._binding, self._aside[2]
        assert binding is not None
        aside = indices
        if binding.group.width > 1:
            known, pages = pool.lease_of(binding.group.lease_key)
            aside = pages[np.isin(known, indices)]
        return np.union1d(aside, pool.free_pages())

    def _copy_next(self) -> bool:
        """Let the next blocks be copied if those before them are; return whether all are."""
        if not self._collect():
            return False
        plan, engine = self._plan, self._runtime.engine
        assert plan is not None
        if self._next == plan.size:
            return True
        unit_bytes = engine.kv.geometry.page_bytes // plan.units
        at_once = STEP_BYTES if engine.is_synchronous else BESIDE_BYTES
        blocks = max(1, at_once // (unit_bytes * plan.source_units.shape[1]))
        first, self._next = self._next, min(plan.size, self._next + blocks)
        copies, base = plan.copies(first, self._next), engine.spec.first
        by_rank = {
            self._rank - base: by_source(
                copies.src_ranks - base, copies.src_units, copies.dst_units
            )
        }
        self._copies.begin(by_rank, plan.finest)
        self._copies.conclude(lambda: None)
        return self._collect() and self._plan is not None and self._next == self._plan.size

    def _collect(self) -> bool:
        """Take in copies that are over; return whether none is under way."""
        if not self._copies.is_over:
            return False
        if self._copies.has_news:
            try:
                stats = self._copies.take()
            except MoveError as error:
                log.warning("precopy_failed", epoch=self.epoch, reason=str(error))
                self._next = self._copied
                if self._plan is not None:
                    self._plan = replace(self._plan, slots=self._plan.slots[: self._copied])
            else:
                self._copied = self._next
                self._count(stats.link_bytes)
        return True

    def _count(self, link_bytes: int, rounds: int = 0) -> None:
        epoch, number = self._order
        before = self.progress
        if before is None or before.epoch != epoch:
            before = PreCopyProgress(epoch)
        self.progress = PreCopyProgress(
            epoch, number if rounds else before.round, before.bytes + link_bytes
        )

    def _finish_round(self) -> None:
        self._keep()
        self._is_done, self._manifests = True, None
        self._count(0, rounds=1)

    def _keep(self) -> None:
        """Remember what is copied of the plan."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        for each in self._planned.values():
            is_copied = each.slots < self._copied
            if is_copied.any():
                slots = plan.slots[each.slots[is_copied]]
                places, blocks = each.places[is_copied], each.blocks[is_copied]
                found = replace(each, places=places, blocks=blocks, slots=slots)
                known = self._held.get(each.key)
                self._held[each.key] = found if known is None else known.with_more(found)
        self._planned = {}

    # ------------------------------------------------------------------ what it comes to

    def held(self, epoch: int) -> tuple[EarlyCopy, ...]:
        """Return what this rank has copied for the switch of this epoch; its copies are over."""
        return tuple(self._held.values()) if epoch == self.epoch else ()

    def unbound(self) -> None:
        """Note that the rank leaves its group: wait for copies; the pages are as all others now."""
        self._stop()
        self._binding = None
        self._aside = _NOTHING_ASIDE

    def end(self) -> None:
        """Give the pages back, and forget all copies: another layout or plan is wanted.

        Raises as `advance` does.
        """
        if self._binding is not None:
            self._give_back()
        self.forget()
        self._planner.forget_manifests()
        self._order, self.progress = (0, 0), None

    def forget(self) -> None:
        """Forget all copies, as their pages may go to others, all requests and the draft."""
        self._stop()
        self._held.clear()
        self._sent.clear()
        self.requests.forget()
        self._planner.forget_draft()

    def _stop(self) -> None:
        """Wait for copies under way, and begin no more in this round."""
        while not self._copies.is_over:
            self._runtime.host.sleep(POLL_S)
        self._collect()
        self._keep()
        self._is_done, self._grant = True, None
        self._drop_work()

    def _drop_work(self) -> None:
        """Forget what is read and planned for this round."""
        if self._work is not None:
            self._work.cancel()
        self._work = self._manifests = None

    def _give_back(self) -> None:
        """Let tasks of the serving group have its pages, once followers copy nothing there."""
        binding, self._binding = self._binding, None
        assert binding is not None
        self.forget()
        scheduler = self._runtime.mode_of(binding.group).scheduler
        self._aside = _NOTHING_ASIDE
        if scheduler is not None:
            scheduler.look_ahead(0)
            if scheduler.set_aside(0).size:
                self._runtime.lead(SetAside(binding.formation, *self._order, None))
                scheduler.give_back()


def _key(order: tuple[int, int]) -> int:
    """Return the mailbox's number of a round."""
    epoch, number = order
    return -(epoch * ROUNDS_PER_EPOCH + number)


def _read(messages: Mapping[int, bytes]) -> dict[int, Manifest]:
    return {rank: pickle.loads(each) for rank, each in messages.items()}  # noqa: S301 -- our own ranks' memory


def _nothing(rank: int) -> EarlyPlan:
    nothing = np.zeros((0, 1), dtype=np.int64)
    alone = Split(1, 1)
    return EarlyPlan(alone, UnitOrder(alone, 1), rank, nothing, nothing, _NO_INDICES, {})

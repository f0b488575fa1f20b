"""A rank's migration at a switch: publish a manifest, plan, copy, then hand over on commit.

Nothing is given up before the coordinator has committed the migration, so an overtaken switch or a
failed rank leaves every task where it was. A later copy round may overwrite what an earlier one has
read: if that has begun and no commit follows, the tasks have lost their KV and are recomputed.
"""

import pickle
from collections.abc import Callable, Mapping

import numpy as np
import structlog

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.switch_actions import Resolve
from coordinator.protocol.terms import Binding, Carry, ReturnCause, TaskId
from kvadaptor.reshard.terms import ReshardError
from kvadaptor.transfer.mailbox import GAVE_UP, MailboxFullError, RankMailbox
from kvadaptor.transfer.rounds import MoveError
from worker.rank.engine import EngineMode, EngineScheduler
from worker.rank.led_tasks import LedTask
from worker.rank.migration.copy_rounds import (
    CopyRounds,
    IncomingTask,
    MigrationCallbacks,
    MoveFailedError,
    OvertakenError,
    PreparedMigration,
)
from worker.rank.migration.manifest import (
    Ints,
    LateTokens,
    MigrationPlan,
    Ranks,
    TaskSnapshot,
    manifest_of,
    nothing_of,
)
from worker.rank.migration.manifest_changes import changes_since
from worker.rank.migration.plan_ahead import MigrationPlanner, log_shortage
from worker.rank.migration.precopy import PreCopy
from worker.rank.runtime_protocol import Runtime
from worker.rank.task_state import prefixes_of

log = structlog.get_logger()


class Migration:
    """The migrations of one rank; used by its main loop alone, at safe points."""

    def __init__(self, runtime: Runtime, mailboxes: Mapping[Rank, RankMailbox], rank: Rank) -> None:
        self._runtime = runtime
        self._mailboxes = mailboxes
        self._rank = rank
        self._group: Group | None = None
        self._formation = -1
        self._is_published = False
        """Whether peers rely on this rank's state of the group until the migration is decided."""
        self._pending: PreparedMigration | None = None
        self._rounds = CopyRounds(runtime.engine, mailboxes, rank, self._press_on, runtime.host)
        self.planning = MigrationPlanner(runtime.engine, mailboxes, rank)
        self.precopy = PreCopy(
            *(runtime, self.planning, mailboxes, rank),
            *(self._rounds.another_thread(), self._rounds.end),
        )
        self._publication: tuple[EngineScheduler | None, dict[str, int]] | None = None
        """The scheduler, and the tokens of each task as published, until the last step is over."""
        self.adopted: tuple[Adopted, ...] = ()
        """Tasks that this rank leads if the migration is committed."""
        self.cached: tuple[int, ...] = ()
        """Hashes of prompt blocks that the last migration carried here, until they are reported."""
        self.has_failed = False
        self._lost_in = 0
        """The epoch whose published manifest has become stale; 0 is none."""
        self._meets_in: Ranks = ()
        """The group whose members have copies in flight when it is joined."""

    def take_copied(self) -> tuple[int, float, int] | None:
        """Return (epoch, seconds, bytes over the link) of a migration, once, when all is copied."""
        copied = self._rounds.take_copied()
        return copied and (copied[0], copied[1].seconds, copied[1].link_bytes)

    @property
    def epoch(self) -> int:
        """The epoch of the migration that this rank carried out, while undecided; 0 is none."""
        return self._pending.epoch if self._pending is not None else 0

    @property
    def free_pages_after_commit(self) -> int:
        """Pages that are free once the migration that this rank carried out is committed."""
        if self._pending is None:
            return 0
        pool, move, group = self._runtime.engine.pages, self._pending.move, self._group
        now, given = pool.counts(), 0
        if group is not None and self._gives_up(move, group):
            given = now.owned if group.width == 1 else now.leased.get(group.lease_key, 0)
        return now.free + given - move.pages_taken(self._rank)

    # ------------------------------------------------------------------ before

    def joined(self) -> None:
        """Note that the rank joined a group: no task waits for a migration any more."""
        self._group = None
        self.precopy.forget()
        self.planning.forget_manifests()

    def on_leave(self, binding: Binding) -> None:
        """Note that the rank left this group; its tasks may migrate, so their pages stay."""
        self._group = binding.group
        self._formation = binding.formation
        self._is_published = True

    def gave_up(self, key: Ranks) -> None:
        """Note that pages of a group were given up: without this share its tasks cannot migrate."""
        if key and self.key == key:
            self._group = None
            self.precopy.forget()

    @property
    def key(self) -> tuple[Rank, ...]:
        """The lease key of the group whose tasks wait for a migration; empty if there is none."""
        return self._group.lease_key if self._group is not None else ()

    @property
    def published_key(self) -> tuple[Rank, ...]:
        """`key`, if the published state of that group must stay true until the decision."""
        return self.key if self._is_published else ()

    @property
    def goal(self) -> tuple[Rank, ...]:
        """The lease key of the group that this rank may join if its migration is committed.

        Its leader may use the whole lease before this rank hears of the commit.
        """
        bindings = self._pending.move.bindings if self._pending is not None else ()
        mine = (each.group.lease_key for each in bindings if self._rank in each.group.ranks)
        return next(mine, ())

    def publish(self, epoch: int, drafted: int = 0) -> None:
        """Publish this rank's manifest for migration `epoch`; its last step may be in flight.

        If all ranks have read what this one published in the round `drafted`, and tasks have only
        got tokens or ended since, it publishes just that.
        """
        self.adopted = ()
        self._is_published = True
        # A peer that has read the new manifest may copy from and to these pages.
        self._rounds.end()
        counts = self._publish_changes(epoch, drafted)
        if counts is None:
            counts = self._publish_all(epoch)
        scheduler = self._runtime.mode_of(self._group).scheduler if self._group else None
        self._publication = scheduler, counts
        self.look()

    def _publish_changes(self, epoch: int, drafted: int) -> dict[str, int] | None:
        before, group = self.planning.manifest_in(epoch, drafted), self._group
        if before is None or group is None or self.planning.draft_of(epoch) != drafted:
            return None
        own = self._runtime, self._rank, group, self._formation
        changes = changes_since(before, *own, drafted)
        if changes is None:
            return None
        try:
            self._mailboxes[self._rank].publish(epoch, pickle.dumps(changes, protocol=5))
        except MailboxFullError:
            return None
        states = [before.cargo[place].state for place in changes.tasks]
        new = zip(states, changes.counts, strict=True)
        return {state.task: state.count + count for state, count in new}

    def _publish_all(self, epoch: int) -> dict[str, int]:
        """Publish all; return how many tokens of each task that tells of."""
        early, draft = self.precopy.held(epoch), self.planning.draft_of(epoch)
        own = self._runtime, self._rank, self._group, self._formation
        manifest = manifest_of(*own, early, draft=draft)
        try:
            self._mailboxes[self._rank].publish(epoch, pickle.dumps(manifest, protocol=5))
        except MailboxFullError:
            log.warning("move_too_large", tasks=len(manifest.cargo), advice="they are recomputed")
            manifest = nothing_of(manifest)
            self._mailboxes[self._rank].publish(epoch, pickle.dumps(manifest, protocol=5))
        return {each.state.task: each.state.count for each in manifest.cargo}

    @property
    def is_quiescing(self) -> bool:
        """Whether peers wait, or will wait, for the end of the last step."""
        return self._publication is not None

    def look(self) -> None:
        """Publish the tokens of the last step, as soon as they are there."""
        steps = self._runtime.steps
        steps.finish_detached_if_ready()
        if self._publication is None or steps.has_inflight or steps.draining_groups:
            return
        (scheduler, counts), self._publication = self._publication, None
        tokens = scheduler.tokens_since(counts) if scheduler is not None else {}
        late = {
            task: LateTokens(tuple(of_task), led.emitted)
            for task, of_task in tokens.items()
            if (led := self._runtime.book.get(TaskId(task))) is not None
        }
        mailbox = self._mailboxes[self._rank]
        try:
            mailbox.settle(pickle.dumps(late, protocol=5))
        except MailboxFullError as error:
            log.warning("move_failed", epoch=mailbox.epoch, reason=str(error))
            mailbox.finish_round(GAVE_UP)

    def prepare(self, wanted: Directive | None) -> bool:
        """Plan the migration of this directive, if any; return whether this rank awaits others.

        Runs a deferred step once that is done or has taken too long.
        """
        steps = self._runtime.steps
        is_awaited = steps.has_deferred_step if wanted is None else self.planning.plan_ahead(wanted)
        if steps.has_deferred_step and (steps.is_late or not is_awaited):
            steps.run_deferred()
        return is_awaited

    def _press_on(self) -> None:
        """Finish local work that peers may be blocked on."""
        self._runtime.steps.run_deferred()
        self.look()

    def lose(self) -> None:
        """Mark the published manifest as stale: the migration planned from it must fail."""
        self._publication = None
        own = self._mailboxes[self._rank]
        self._lost_in = own.epoch
        own.finish_round(GAVE_UP)

    # ------------------------------------------------------------------ the migration

    def move(self, directive: Directive, overtaken: Callable[[], bool]) -> None:
        """Copy this rank's share; on return all is copied or in flight, or `has_failed` is set."""
        epoch = directive.stage.epoch
        self.has_failed = False
        self.adopted = ()
        own = self._mailboxes[self._rank]
        try:
            if own.epoch != epoch:
                self.publish(epoch)
            if self._lost_in == epoch:
                raise MoveFailedError("a member was lost during the last step of the old group.")
            for rank in sorted(self.planning.peers(directive, directive.movers)):
                self._await_manifest(rank, epoch, overtaken)
            move = self.planning.plan(directive)
            self._pending = pending = PreparedMigration(epoch, move)
            restore, go_on = (lambda: self._restore(pending)), (lambda: self._go_on(pending))
            log_shortage(epoch, self._rank, move)
            self._rounds.carry_out(pending, MigrationCallbacks(restore, go_on, overtaken))
        except OvertakenError:
            own.finish_round(GAVE_UP)
            self.adopted = ()
            raise
        except (MoveFailedError, MoveError, ReshardError) as error:
            log.warning("move_failed", epoch=epoch, reason=str(error))
            self._fail()
        except Exception:
            # Every rank must learn of the failure, and no task may be lost.
            log.exception("move_failed", epoch=epoch)
            self._fail()

    def _fail(self) -> None:
        self._mailboxes[self._rank].finish_round(GAVE_UP)
        self.has_failed = True
        self.adopted = ()

    def _await_manifest(self, rank: Rank, epoch: int, overtaken: Callable[[], bool]) -> None:
        mailbox = self._mailboxes[rank]
        self._rounds.wait(
            lambda: mailbox.epoch == epoch, overtaken, f"rank {rank} has not published its manifest"
        )

    def _restore(self, pending: PreparedMigration) -> None:
        """Build what this rank will continue as a leader."""
        move = pending.move
        is_led = [each.group.leader == self._rank for each in move.bindings]
        led = [each for each in move.plan.carried if is_led[each.group]]
        # All blocks at once: numpy takes a millisecond for 128 small arrays.
        for carried, blocks in zip(led, move.blocks(led), strict=True):
            if carried.cached:
                tokens = self._runtime.engine.kv.geometry.tokens_per_slot
                pending.chains.append(move.chains[carried.id].prefix_in(blocks, tokens))
                continue
            leader, cargo = move.cargo[carried.id]
            known = self.precopy.requests.take(leader, cargo)
            if known is None:
                intake = self._runtime.engine.intake
                request = intake.continued_request(cargo.payload, cargo.state)
                known = request, request.token_ids()
            pending.incoming.append(IncomingTask(cargo, known[0], blocks, known[1]))
            self.look()

    def _go_on(self, pending: PreparedMigration) -> None:
        """Add the tokens of the last steps, and drop tasks that ended in them."""
        late: dict[str, LateTokens] = {}
        for rank in {leader for leader, _ in pending.move.cargo.values()}:
            message = self._mailboxes[Rank(rank)].settled_message
            late |= pickle.loads(message)  # noqa: S301 -- our own ranks' memory
        incoming = []
        for each in pending.incoming:
            news = late.get(each.cargo.state.task)
            if news is not None:
                each.request.go_on(news.tokens)
                old = each.cargo  # `replace` takes five times as long.
                cargo = TaskSnapshot(old.header, old.attempt, news.emitted, old.payload, old.state)
                incoming.append(IncomingTask(cargo, each.request, each.blocks, each.tokens))
        pending.incoming = incoming
        cargoes = [each.cargo for each in incoming]
        self.adopted = tuple(
            Adopted(cargo.header.task, cargo.attempt + 1, cargo.emitted) for cargo in cargoes
        )

    # ------------------------------------------------------------------ afterwards

    def meets_in(self, group: Group) -> bool:
        """Return whether the members of this led group must synchronize when it begins."""
        return self._meets_in == group.ranks

    def forget_meeting(self) -> None:
        """Let members of the next groups begin without synchronizing."""
        self._meets_in = ()

    def arrive(self, mode: EngineMode, *, meets: bool) -> None:
        """Keep new writes away from pages that copies of the last migration still need.

        If members synchronize (`meets`), their devices wait for the copies, otherwise the host.
        """
        if meets:
            self._rounds.go_before()
            self._runtime.engine.meet(mode.width)
        else:
            self._rounds.end_all()

    def resolve(self, resolve: Resolve) -> None:
        """On commit continue with the adopted tasks; else keep the old ones or apply the plan."""
        pending, self._pending = self._pending, None
        self._publication, self._is_published = None, False
        self.precopy.forget()
        self.planning.forget_manifests()
        self.adopted = ()
        self._runtime.steps.run_deferred()
        self._runtime.steps.finish_inflight()
        if resolve.is_committed:
            assert pending is not None and pending.epoch == resolve.epoch
            self._commit(pending)
            if resolve.is_joined:
                return  # The rank joins the new group next.
            self._runtime.leases.not_joined()
        is_spoiled = not resolve.is_committed and pending is not None and pending.may_be_spoiled
        if is_spoiled:
            log.info("move_spoiled", epoch=resolve.epoch, advice="its tasks are recomputed")
        if resolve.stays_parked and not is_spoiled:
            return
        group, self._group = self._group, None
        if group is not None and group.leader == self._rank:
            self._leave_where_it_is(group, resolve.directive.carry, is_spoiled=is_spoiled)

    def _leave_where_it_is(self, group: Group, carry: Carry, *, is_spoiled: bool) -> None:
        scheduler = self._runtime.mode_of(group).scheduler
        assert scheduler is not None
        if is_spoiled or carry is not Carry.PAUSE:
            self._runtime.give_up(group, scheduler.holding(), ReturnCause.RECOMPUTE)
        self._runtime.leases.withdraw(group)

    def _commit(self, pending: PreparedMigration) -> None:
        self._hand_over(pending.move)
        move = pending.move
        for number, binding in enumerate(move.bindings):
            if self._rank not in binding.group.ranks:
                continue
            self._take_pages(move, number)
            self._meets_in = binding.group.ranks if pending.ends_late else ()
            self._group, self._formation = binding.group, binding.formation
            self._runtime.leases.prepared(binding, move.indices[number])
            if binding.group.leader == self._rank:
                self._adopt(binding, pending, move.indices[number])

    def _hand_over(self, move: MigrationPlan) -> None:
        """Give up the old group: other leaders continue its tasks, or they are recomputed."""
        group = self._group
        if group is None:
            return
        pool = self._runtime.engine.pages
        mode = self._runtime.mode_of(group)
        if mode.scheduler is not None:
            carried = [each.id for each in move.plan.carried if not each.cached]
            gone = [
                name for name in carried if name in move.cargo and move.cargo[name][0] == self._rank
            ]
            self._runtime.hand_over(group, gone)
            self._runtime.give_up(group, mode.scheduler.holding(), ReturnCause.RECOMPUTE)
            self._runtime.leases.withdraw(group)
        if group.mode is Mode.DP or not self._gives_up(move, group):
            return  # A leader that took no part publishes what its tasks still hold.
        assert mode.table is not None
        # An earlier formation of these ranks may have been lost, and this one may not have begun.
        self._runtime.leases.end_rescue(group.lease_key)
        mode.table.unmap(pool.lease_indices(group.lease_key))
        pool.keep_only(group.lease_key, ())

    def _gives_up(self, move: MigrationPlan, group: Group) -> bool:
        """Return whether the migration leaves nothing of the old group."""
        return group.leader == self._rank or group.ranks in move.old_groups

    def _take_pages(self, move: MigrationPlan, number: int) -> None:
        lease, group = move.plan.groups[number], move.bindings[number].group
        pool = self._runtime.engine.pages
        place = group.ranks.index(self._rank)
        if group.width == 1:
            pool.own_these(lease.pages[place])
            return
        indices = move.indices[number]
        pages = lease.pages[place]
        self._runtime.leases.end_rescue(group.lease_key)
        pool.lease_these(group.lease_key, indices, pages)
        table = self._runtime.mode_of(group).table
        assert table is not None
        # The plan's blocks cover each slot of these pages once, in their own order.
        blocks = np.arange(group.width, group.width * (indices.size + 1))
        renumbered = group.width * indices[blocks // group.width - 1] + blocks % group.width
        table.assign(renumbered, lease.table[place][blocks])

    def _adopt(self, binding: Binding, pending: PreparedMigration, indices: Ints) -> None:
        runtime = self._runtime
        scheduler = runtime.mode_of(binding.group).scheduler
        assert scheduler is not None
        pool = runtime.engine.pages
        dp = binding.group.width == 1
        granted = pool.own_pages() if dp else pool.lease_indices(binding.group.lease_key)
        for cargo in (each.cargo for each in pending.incoming):
            led = LedTask(
                header=cargo.header,
                attempt=cargo.attempt + 1,
                group=binding.group,
                emitted=cargo.emitted,
                payload=cargo.payload,
            )
            runtime.book.open(led)
        tasks = [(each.request, each.blocks) for each in pending.incoming]
        known = {each.cargo.state.task: each.tokens for each in pending.incoming}
        # Register the newest chain last, so that it is reused last.
        chains = list(reversed(pending.chains))
        scheduler.adopt(tasks, chains, granted, indices, known)
        self.cached = prefixes_of(chains)

"""The pages of a rank that its groups lease: what each begins with, keeps, and loses.

A group's leader publishes what its parked tasks still hold; the members free the rest. A lease is
worthless once a process that had a share of it is lost, so the rank frees its pages. The rank
remembers the processes itself, because the coordinator may have restarted since. Used by the rank's
main loop alone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from comm_pool.layout import Group, Mode, Rank, group_of, lease_key
from coordinator.protocol.messages.rank import Directive, LeaseRetention
from coordinator.protocol.switch_actions import Leave, Move, Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, ReturnCause
from kvadaptor.pages import without
from worker.io.host import Host
from worker.rank.engine import Engine, EngineMode, LeaseIndices

RESCUE_S = 2.0
"""How long the members of a lost group keep its tasks' KV for those who continue them."""

VERSIONS_PER_INCARNATION = 1 << 32
"""Lease versions grow across restarts of a leader: its incarnation is their high part."""

Key = tuple[Rank, ...]
"""The key of a group's lease: its members (`Group.lease_key`)."""


class LeaseUse(Protocol):
    """The leases that a migration relies on."""

    @property
    def key(self) -> Key:
        """The group whose tasks wait for a migration; empty if there is none."""

    @property
    def published_key(self) -> Key:
        """The group whose published pages must stay as they are; empty if there is none."""

    @property
    def goal(self) -> Key:
        """The group that this rank may join next; empty if there is none."""

    def gave_up(self, key: Key) -> None:
        """Note that pages of a group were given up."""


class LeaseOwner(Protocol):
    """What leases need from the runtime that owns them."""

    @property
    def engine(self) -> Engine:
        """The engine of this rank."""

    @property
    def host(self) -> Host:
        """The host of this rank."""

    @property
    def migration(self) -> LeaseUse:
        """The migration of this rank."""

    @property
    def bound_key(self) -> Key:
        """The joined group; empty if there is none."""

    def mode_of(self, group: Group) -> EngineMode:
        """Return the mode prepared for a group of this rank."""

    def give_up(
        self, group: Group, tasks: Sequence[str], cause: ReturnCause, *, keeps_pages: bool = ...
    ) -> None:
        """Return tasks to the pool with their tokens."""


class LeaseMembers:
    """The incarnations of each group's members when the group was last formed."""

    def __init__(self) -> None:
        self._members: dict[Key, tuple[int | None, ...]] = {}

    def formed(self, key: Key, present: Mapping[Rank, int]) -> None:
        """Record the current members of a group that leases pages or is about to."""
        self._members[key] = tuple(present.get(rank) for rank in key)

    def of(self, key: Key) -> tuple[int, ...]:
        """Return the incarnations of a group's members when it was formed; 0 where unknown."""
        return tuple(each or 0 for each in self._members.get(key, (None,) * len(key)))

    def take_lost(self, present: Mapping[Rank, int], whole: Collection[Key]) -> list[Key]:
        """Return, once, the groups that lack a member; a later call checks those in `whole`.

        `whole` holds the bound group and the group that a migration may lead to.
        """
        lost = [
            key
            for key, members in self._members.items()
            if key not in whole and members != tuple(present.get(rank) for rank in key)
        ]
        for key in lost:
            del self._members[key]
        return lost


class Leases:
    """The leases of all groups of this rank; pages in use are freed after the next action."""

    def __init__(self, runtime: LeaseOwner, incarnation: int) -> None:
        self.retentions: dict[Key, LeaseRetention] = {}
        """What the parked tasks that this rank leads hold of each wide group's lease."""
        self._runtime = runtime
        self._version = incarnation * VERSIONS_PER_INCARNATION
        self._applied: dict[Key, tuple[int, int]] = {}
        """The newest (formation, version) that each lease was changed by."""
        self._formations: dict[Key, int] = {}
        """The last formation of each group."""
        self._moved_in: dict[Key, tuple[int, ...]] = {}
        """Lease indices that hold migrated tasks of a group, until the group begins."""
        self._sharers = LeaseMembers()
        self._present: dict[Rank, int] = {}
        """The processes of the cell, by the last directive."""
        self._rescues: dict[Key, tuple[int, LeaseIndices]] = {}
        """Until when, in nanoseconds, which pages of lost groups stay for those who read them."""

    # ------------------------------------------------------------------ groups come and go

    def joined(self, binding: Binding) -> None:
        """Note that the rank joined a group."""
        self._formations[binding.group.lease_key] = binding.formation

    def prepared(self, binding: Binding, indices: npt.NDArray[np.int64]) -> None:
        """Note that a migration has leased these indices to a group about to be joined."""
        key = binding.group.lease_key
        self._formations[key] = binding.formation
        self._moved_in[key] = tuple(indices.tolist())
        self._applied[key] = (binding.formation, -1)

    def is_prepared(self, group: Group) -> bool:
        """Whether a migration has leased pages to this group, which begins next.

        All members begin with these pages, whatever tasks hold by then. On each they lie in an
        order of its own, so the leader's scheduler must not forget that they belong together.
        """
        return group.lease_key in self._moved_in

    def not_joined(self) -> None:
        """Drop the preparation for a group that is not joined; its leader retains pages."""
        self._moved_in.clear()

    def begin(
        self, mode: EngineMode, binding: Binding, grant_pages: int, indices: tuple[int, ...]
    ) -> LeaseIndices:
        """Lease pages for the joined group (dp: own them) besides these; return all that it has."""
        pool, group = self._runtime.engine.pages, binding.group
        moved_in = self._moved_in.pop(group.lease_key, ())
        if group.mode is Mode.DP:
            pool.grant_own_pages(grant_pages)
            self._publish(mode, binding)
            return pool.own_pages()
        assert mode.table is not None
        self.end_rescue(group.lease_key)
        indices = (*indices, *moved_in)
        is_held = pool.are_leased(group.lease_key, np.array(indices, dtype=np.int64))
        assert is_held, "tasks hold pages that this rank has given up."
        self.keep_only(group.lease_key, indices)
        mode.table.map(*pool.lease_pages(group.lease_key, grant_pages))
        self._publish(mode, binding)
        return pool.lease_indices(group.lease_key)

    def _publish(self, mode: EngineMode, binding: Binding) -> None:
        """Let the group's directory tell where this rank has its blocks, and no other."""
        engine = self._runtime.engine
        for each in engine.modes.values():
            stays = each is mode or lease_key(each.ranks, each.stages) in self._rescues
            if each.directory is not None and not stays:
                each.directory.give_up(engine.spec.rank)
        if (directory := mode.directory) is None:
            return
        if mode.is_leader:
            directory.begin(binding.formation, self._sharers.of(binding.group.lease_key))
        slots = mode.table.all_slots() if mode.table is not None else None
        directory.keep(engine.spec.rank, binding.formation, slots)

    def began(self, binding: Binding, version: int) -> None:
        """Note that retentions up to this version are obsolete, as the group has begun."""
        self._applied[binding.group.lease_key] = (binding.formation, version)

    def withdraw(self, group: Group) -> None:
        """Release pages of a parked group that no task holds; a wide group publishes the rest."""
        mode, pool = self._runtime.mode_of(group), self._runtime.engine.pages
        assert mode.scheduler is not None, "this rank does not lead the group."
        held = mode.scheduler.withdraw()
        if group.mode is Mode.DP:
            pool.keep_own(held)
            return
        self._version += 1
        formation, indices = self._formations[group.lease_key], tuple(held.tolist())
        self.retentions[group.lease_key] = LeaseRetention(
            group.lease_key, self._version, indices, formation
        )

    # ------------------------------------------------------------------ pages are given up

    def apply_retentions(self, retentions: Iterable[LeaseRetention]) -> bool:
        """Free pages of unbound groups that their leaders do not need; return whether any were."""
        runtime, changed = self._runtime, False
        migration = runtime.migration
        for each in retentions:
            order = (each.formation, each.version)
            # An old retention does not cover pages leased since; a published manifest must stay
            # true.
            is_old = self._applied.get(each.ranks, (-1, -1)) >= order
            in_use = runtime.bound_key, migration.published_key, migration.goal
            if is_old or each.ranks in in_use:
                continue
            self._applied[each.ranks] = order
            waited = migration.key == each.ranks
            if not self.keep_only(each.ranks, each.indices):
                continue
            changed = True
            if waited and self._leads(each.ranks):
                # No migration ends for this group any more, to say what its tasks hold.
                self.withdraw(group_of(each.ranks))
        return changed

    def keep_only(self, key: Key, indices: Sequence[int]) -> bool:
        """Free all other pages of a group's lease; return whether there were any.

        Those with KV that others may read for the tasks of a lost group are freed by `look`.
        """
        runtime = self._runtime
        pool = runtime.engine.pages
        dropped = pool.lease_without(key, np.array(indices, dtype=np.int64))
        if not dropped.size:
            return False
        runtime.migration.gave_up(key)
        group = group_of(key)
        mode = runtime.mode_of(group)
        assert mode.ranks == group.ranks and mode.table is not None
        if mode.scheduler is not None and (lost := mode.scheduler.holders_of(dropped)):
            # A member's share of these pages is lost, so their tasks are recomputed.
            runtime.give_up(group, lost, ReturnCause.RECOMPUTE)
        self._free(key, without(dropped, self._rescued(key, mode, dropped)))
        return True

    def _free(self, key: Key, indices: LeaseIndices) -> None:
        """Free the pages of these lease indices of a group, if it has them still."""
        engine = self._runtime.engine
        pool = engine.pages
        indices = pool.in_use(key, indices)
        if not indices.size:
            return
        mode = self._runtime.mode_of(group_of(key))
        assert mode.table is not None
        freed = pool.free_leased(key, indices)
        if mode.directory is not None:
            # A migration may have filled the pages of several indices in another order.
            mode.directory.give_up_pages(engine.spec.rank, freed)
        mode.table.unmap(indices)

    def _rescued(self, key: Key, mode: EngineMode, dropped: LeaseIndices) -> LeaseIndices:
        """Return which of these pages of a lease stay for now: a lost group's tasks need them.

        Other groups have to find room for what is in them.
        """
        directory = mode.directory
        if directory is None or not self._is_lost(key) or not directory.formation:
            self.end_rescue(key)
            return dropped[:0]
        now_ns = self._runtime.host.now_ns()
        due_ns, _ = self._rescues.get(key, (now_ns + int(RESCUE_S * 1e9), dropped))
        engine, k = self._runtime.engine, len(key)
        indices, pages = engine.pages.lease_of(key)
        is_held = np.isin(pages, directory.held_pages(engine.spec.rank))
        held = np.intersect1d(indices[is_held], dropped)
        # All k members have n such pages; the others' free pages must hold these k·n.
        total = engine.pages.counts().total
        rescued = held[: (k - 1) * total // (2 * k - 1)]
        # A migration may have taken pages from this lease since the directory began.
        stay = pages[np.isin(indices, rescued)]
        directory.give_up_pages(engine.spec.rank, without(np.arange(total), stay))
        self._rescues[key] = due_ns, rescued
        return rescued

    def _is_lost(self, key: Key) -> bool:
        """Return whether the group's last formation was aborted, or lacks a process by now."""
        formation = self._formations.get(key, 0)
        ranks = tuple(sorted(key))
        if self._runtime.engine.communicators.is_aborted(ranks, formation):
            return True
        return self._sharers.of(key) != tuple(self._present.get(rank, 0) for rank in key)

    def look(self) -> None:
        """Free the pages of lost groups that have stayed long enough."""
        if self._rescues:
            now_ns = self._runtime.host.now_ns()
            for key in [key for key, each in self._rescues.items() if each[0] <= now_ns]:
                self.end_rescue(key)

    def end_rescue(self, key: Key) -> None:
        """Free what stayed of a lost group: nobody continues its tasks from here any more."""
        if (rescue := self._rescues.pop(key, None)) is not None:
            self._free(key, rescue[1])

    # ------------------------------------------------------------------ directives

    def formed(self, key: Key, directive: Directive) -> None:
        """Record the members, as in this directive, of a group that leases pages or is about to."""
        self._sharers.formed(key, dict(directive.members))

    def hear(self, directive: Directive, participant: SwitchParticipant) -> bool:
        """Free pages that no leader needs or whose lease lost a member; return whether any were."""
        self._present = dict(directive.members)
        self._runtime.engine.know(self._present)
        # A rank holds leases only in groups that contain it.
        changed = self.apply_retentions(
            [each for each in directive.retentions if participant.rank in each.ranks]
        )
        if participant.wanted is directive and directive.stage.epoch > 0:
            bound = participant.binding.group.lease_key if participant.binding is not None else ()
            whole = bound, self._runtime.migration.goal
            for key in self._sharers.take_lost(dict(directive.members), whole):
                changed |= self._lose(key)
        return changed

    def _lose(self, key: Key) -> bool:
        """Free all pages of a lease that lost a member; return whether there were any.

        Members that were only out of reach know of no loss, so a leader tells them, too.
        """
        changed = self.keep_only(key, ())
        if changed and self._leads(key):
            self.withdraw(group_of(key))
        return changed

    def _leads(self, key: Key) -> bool:
        """Return whether this rank leads the group of a lease."""
        return group_of(key).leader == self._runtime.engine.spec.rank

    def made(self, move: Move, participant: SwitchParticipant) -> None:
        """Apply again what a directive could not free before this action completed.

        This cannot wait: the next action may form the group anew, and then all retained pages would
        count as part of that formation.
        """
        if isinstance(move, Leave) or (isinstance(move, Resolve) and not move.is_joined):
            self.hear(move.directive, participant)

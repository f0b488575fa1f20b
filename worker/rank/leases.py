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

from comm_pool.layout import Group, Mode, Rank
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

Ranks = tuple[Rank, ...]


class LeaseUse(Protocol):
    """The leases that a migration relies on."""

    @property
    def published_ranks(self) -> Ranks:
        """The group whose published pages must stay as they are; empty if there is none."""

    @property
    def goal(self) -> Ranks:
        """The group that this rank may join next; empty if there is none."""

    def gave_up(self, ranks: Ranks) -> None:
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
    def bound_ranks(self) -> Ranks:
        """The joined group; empty if there is none."""

    def give_up(
        self, group: Group, tasks: Sequence[str], cause: ReturnCause, *, keeps_pages: bool = ...
    ) -> None:
        """Return tasks to the pool with their tokens."""


class LeaseMembers:
    """The incarnations of each group's members when the group was last formed."""

    def __init__(self) -> None:
        self._members: dict[Ranks, tuple[int | None, ...]] = {}

    def formed(self, ranks: Ranks, present: Mapping[Rank, int]) -> None:
        """Record the current members of a group that leases pages or is about to."""
        self._members[ranks] = tuple(present.get(rank) for rank in ranks)

    def of(self, ranks: Ranks) -> tuple[int, ...]:
        """Return the incarnations of a group's members when it was formed; 0 where unknown."""
        return tuple(each or 0 for each in self._members.get(ranks, (None,) * len(ranks)))

    def take_lost(self, present: Mapping[Rank, int], whole: Collection[Ranks]) -> list[Ranks]:
        """Return, once, the groups that lack a member; a later call checks those in `whole`.

        `whole` holds the bound group and the group that a migration may lead to.
        """
        lost = [
            ranks
            for ranks, members in self._members.items()
            if ranks not in whole and members != tuple(present.get(rank) for rank in ranks)
        ]
        for ranks in lost:
            del self._members[ranks]
        return lost


class Leases:
    """The leases of all groups of this rank; pages in use are freed after the next action."""

    def __init__(self, runtime: LeaseOwner, incarnation: int) -> None:
        self.retentions: dict[Ranks, LeaseRetention] = {}
        """What the parked tasks that this rank leads hold of each wide group's lease."""
        self._runtime = runtime
        self._version = incarnation * VERSIONS_PER_INCARNATION
        self._applied: dict[Ranks, tuple[int, int]] = {}
        """The newest (formation, version) that each lease was changed by."""
        self._formations: dict[Ranks, int] = {}
        """The last formation of each group."""
        self._moved_in: dict[Ranks, tuple[int, ...]] = {}
        """Lease indices that hold migrated tasks of a group, until the group begins."""
        self._sharers = LeaseMembers()
        self._present: dict[Rank, int] = {}
        """The processes of the cell, by the last directive."""
        self._rescues: dict[Ranks, tuple[int, LeaseIndices]] = {}
        """Until when, in nanoseconds, which pages of lost groups stay for those who read them."""

    # ------------------------------------------------------------------ groups come and go

    def joined(self, binding: Binding) -> None:
        """Note that the rank joined a group."""
        self._formations[binding.group.ranks] = binding.formation

    def prepared(self, binding: Binding, indices: npt.NDArray[np.int64]) -> None:
        """Note that a migration has leased these indices to a group about to be joined."""
        ranks = binding.group.ranks
        self._formations[ranks] = binding.formation
        self._moved_in[ranks] = tuple(indices.tolist())
        self._applied[ranks] = (binding.formation, -1)

    def not_joined(self) -> None:
        """Drop the preparation for a group that is not joined; its leader retains pages."""
        self._moved_in.clear()

    def begin(
        self, mode: EngineMode, binding: Binding, grant_pages: int, indices: tuple[int, ...]
    ) -> LeaseIndices:
        """Lease pages for the joined group (dp: own them) besides these; return all that it has."""
        pool, group = self._runtime.engine.pages, binding.group
        if group.mode is Mode.DP:
            pool.grant_own_pages(grant_pages)
            self._publish(mode, binding)
            return pool.own_pages()
        assert mode.table is not None
        self.end_rescue(group.ranks)
        indices = (*indices, *self._moved_in.pop(group.ranks, ()))
        is_held = set(indices) <= set(pool.lease_indices(group.ranks).tolist())
        assert is_held, "tasks hold pages that this rank has given up."
        self.keep_only(group.ranks, indices)
        mode.table.map(*pool.lease_pages(group.ranks, grant_pages))
        self._publish(mode, binding)
        return pool.lease_indices(group.ranks)

    def _publish(self, mode: EngineMode, binding: Binding) -> None:
        """Let the group's directory tell where this rank has its blocks, and no other."""
        engine = self._runtime.engine
        for each in engine.modes.values():
            if each is not mode and each.directory is not None and each.ranks not in self._rescues:
                each.directory.give_up(engine.spec.rank)
        if (directory := mode.directory) is None:
            return
        if mode.is_leader:
            directory.begin(binding.formation, self._sharers.of(binding.group.ranks))
        slots = mode.table.all_slots() if mode.table is not None else None
        directory.keep(engine.spec.rank, binding.formation, slots)

    def began(self, binding: Binding, version: int) -> None:
        """Note that retentions up to this version are obsolete, as the group has begun."""
        self._applied[binding.group.ranks] = (binding.formation, version)

    def withdraw(self, group: Group) -> None:
        """Release pages of a parked group that no task holds; a wide group publishes the rest."""
        mode, pool = self._runtime.engine.of_width(group.width), self._runtime.engine.pages
        assert mode.scheduler is not None, "this rank does not lead the group."
        held = mode.scheduler.withdraw()
        if group.mode is Mode.DP:
            pool.return_own(without(pool.own_pages(), held))
            return
        self._version += 1
        formation, indices = self._formations[group.ranks], tuple(held.tolist())
        self.retentions[group.ranks] = LeaseRetention(
            group.ranks, self._version, indices, formation
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
            in_use = runtime.bound_ranks, migration.published_ranks, migration.goal
            if is_old or each.ranks in in_use:
                continue
            self._applied[each.ranks] = order
            changed |= self.keep_only(each.ranks, each.indices)
        return changed

    def keep_only(self, ranks: Ranks, indices: Sequence[int]) -> bool:
        """Free all other pages of a group's lease; return whether there were any.

        Those with KV that others may read for the tasks of a lost group are freed by `look`.
        """
        runtime = self._runtime
        pool = runtime.engine.pages
        leased = pool.lease_indices(ranks)
        dropped = without(leased, np.array(indices, dtype=np.int64))
        if not dropped.size:
            return False
        runtime.migration.gave_up(ranks)
        mode = runtime.engine.of_width(len(ranks))
        assert mode.ranks == ranks and mode.table is not None
        if mode.scheduler is not None and (lost := mode.scheduler.holders_of(dropped)):
            # A member's share of these pages is lost, so their tasks are recomputed.
            runtime.give_up(Group(mode.ranks, Mode.TP), lost, ReturnCause.RECOMPUTE)
        self._free(ranks, without(dropped, self._rescued(mode, dropped)))
        return True

    def _free(self, ranks: Ranks, indices: LeaseIndices) -> None:
        """Free the pages of these lease indices of a group."""
        if not indices.size:
            return
        engine = self._runtime.engine
        mode, pool = engine.of_width(len(ranks)), engine.pages
        assert mode.table is not None
        if mode.directory is not None:
            # A migration may have filled the pages of several indices in another order.
            leased, pages = pool.lease_of(ranks)
            freed = pages[np.isin(leased, indices)]
            mode.directory.give_up_pages(engine.spec.rank, freed)
        mode.table.unmap(indices)
        pool.keep_only(ranks, without(pool.lease_indices(ranks), indices).tolist())

    def _rescued(self, mode: EngineMode, dropped: LeaseIndices) -> LeaseIndices:
        """Return which of these pages of a lease stay for now: a lost group's tasks need them.

        Other groups have to find room for what is in them.
        """
        ranks, directory = mode.ranks, mode.directory
        if directory is None or not self._is_lost(ranks) or not directory.formation:
            self.end_rescue(ranks)
            return dropped[:0]
        now_ns = self._runtime.host.now_ns()
        due_ns, _ = self._rescues.get(ranks, (now_ns + int(RESCUE_S * 1e9), dropped))
        engine, k = self._runtime.engine, len(ranks)
        indices, pages = engine.pages.lease_of(ranks)
        is_held = np.isin(pages, directory.held_pages(engine.spec.rank))
        held = np.intersect1d(indices[is_held], dropped)
        # All k members have n such pages; the others' free pages must hold these k·n.
        rescued = held[: (k - 1) * engine.pages.counts().total // (2 * k - 1)]
        self._rescues[ranks] = due_ns, rescued
        return rescued

    def _is_lost(self, ranks: Ranks) -> bool:
        """Return whether the group's last formation was aborted, or lacks a process by now."""
        formation = self._formations.get(ranks, 0)
        if self._runtime.engine.communicators.is_aborted(ranks, formation):
            return True
        return self._sharers.of(ranks) != tuple(self._present.get(rank, 0) for rank in ranks)

    def look(self) -> None:
        """Free the pages of lost groups that have stayed long enough."""
        if self._rescues:
            now_ns = self._runtime.host.now_ns()
            for ranks in [ranks for ranks, each in self._rescues.items() if each[0] <= now_ns]:
                self.end_rescue(ranks)

    def end_rescue(self, ranks: Ranks) -> None:
        """Free what stayed of a lost group: nobody continues its tasks from here any more."""
        if (rescue := self._rescues.pop(ranks, None)) is not None:
            self._free(ranks, rescue[1])

    # ------------------------------------------------------------------ directives

    def formed(self, ranks: Ranks, directive: Directive) -> None:
        """Record the members, as in this directive, of a group that leases pages or is about to."""
        self._sharers.formed(ranks, dict(directive.members))

    def hear(self, directive: Directive, participant: SwitchParticipant) -> bool:
        """Free pages that no leader needs or whose lease lost a member; return whether any were."""
        self._present = dict(directive.members)
        self._runtime.engine.know(self._present)
        # A rank holds leases only in groups that contain it.
        changed = self.apply_retentions(
            [each for each in directive.retentions if participant.rank in each.ranks]
        )
        if participant.wanted is directive and directive.stage.epoch > 0:
            bound = participant.binding.group.ranks if participant.binding is not None else ()
            whole = bound, self._runtime.migration.goal
            for ranks in self._sharers.take_lost(dict(directive.members), whole):
                changed |= self._lose(ranks)
        return changed

    def _lose(self, ranks: Ranks) -> bool:
        """Free all pages of a lease that lost a member; return whether there were any.

        Members that were only out of reach know of no loss, so a leader tells them, too.
        """
        changed = self.keep_only(ranks, ())
        if changed and ranks[0] == self._runtime.engine.spec.rank and len(ranks) > 1:
            self.withdraw(Group(ranks, Mode.TP))
        return changed

    def made(self, move: Move, participant: SwitchParticipant) -> None:
        """Apply again what a directive could not free before this action completed.

        This cannot wait: the next action may form the group anew, and then all retained pages would
        count as part of that formation.
        """
        if isinstance(move, Leave) or (isinstance(move, Resolve) and not move.is_joined):
            self.hear(move.directive, participant)

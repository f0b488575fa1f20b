"""Which processes share each lease of this rank, and how directives change its leases.

A lease is worthless once a process that had a share of it is lost, so the rank frees its pages. The
rank remembers the processes itself, because the coordinator may have restarted since. Used by the
rank's main loop.
"""

from collections.abc import Collection, Mapping

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import Leave, Move, Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from worker.rank.runtime import GroupRuntime

Ranks = tuple[Rank, ...]


class LeaseMembers:
    """The incarnations of each group's members when the group was last formed."""

    def __init__(self) -> None:
        self._members: dict[Ranks, tuple[int | None, ...]] = {}

    def formed(self, ranks: Ranks, present: Mapping[Rank, int]) -> None:
        """Record the current members of a group that leases pages or is about to."""
        self._members[ranks] = tuple(present.get(rank) for rank in ranks)

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


class LeaseUpdates:
    """Frees pages as directives demand; what it must not touch yet it defers until an action."""

    def __init__(self, runtime: GroupRuntime, participant: SwitchParticipant) -> None:
        self._runtime = runtime
        self._participant = participant
        self._sharers = LeaseMembers()

    def formed(self, ranks: Ranks, directive: Directive) -> None:
        """Record the members, as in this directive, of a group that leases pages or is about to."""
        self._sharers.formed(ranks, dict(directive.members))

    def made(self, move: Move) -> None:
        """Apply again what a directive could not free before this action completed.

        It must be now: the next action may form the group anew, and all that is retained would then
        count as part of that formation.
        """
        if isinstance(move, Leave) or (isinstance(move, Resolve) and not move.is_joined):
            self.hear(move.directive)

    def hear(self, directive: Directive) -> bool:
        """Free pages that the directive calls unneeded or worthless; return whether any were."""
        runtime, participant = self._runtime, self._participant
        # A rank holds leases only in groups that contain it.
        changed = runtime.apply_kept(
            [each for each in directive.retentions if participant.rank in each.ranks]
        )
        if participant.wanted is directive and directive.stage.epoch > 0:
            bound = participant.binding.group.ranks if participant.binding is not None else ()
            whole = bound, runtime.migration.goal
            for ranks in self._sharers.take_lost(dict(directive.members), whole):
                changed |= runtime.keep_only(ranks, ())
        return changed

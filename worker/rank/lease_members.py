"""Which processes share each lease of this rank, and what directives say of its leases.

A lease in which a lost process had a share is worth nothing, and its pages are to be freed, whoever
remembers the loss: the coordinator may have started anew since. Used by the rank's main loop.
"""

from collections.abc import Collection, Mapping

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import Leave, Move, Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from worker.rank.runtime import GroupRuntime

Ranks = tuple[Rank, ...]


class LeaseMembers:
    """The incarnations that the members of each group had when it was formed last."""

    def __init__(self) -> None:
        self._members: dict[Ranks, tuple[int | None, ...]] = {}

    def formed(self, ranks: Ranks, present: Mapping[Rank, int]) -> None:
        """The group leases pages, or will, with its members as they are now."""
        self._members[ranks] = tuple(present.get(rank) for rank in ranks)

    def take_lost(self, present: Mapping[Rank, int], whole: Collection[Ranks]) -> list[Ranks]:
        """Return, once, the groups that lack a member; of those that are `whole` it is asked later.

        They are the one that is bound, and the one that a move may lead into.
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
    """Frees pages as directives say; what it must not touch yet it is told of again later."""

    def __init__(self, runtime: GroupRuntime, participant: SwitchParticipant) -> None:
        self._runtime = runtime
        self._participant = participant
        self._sharers = LeaseMembers()

    def formed(self, ranks: Ranks, directive: Directive) -> None:
        """The group leases pages, or will, with its members as this directive tells them."""
        self._sharers.formed(ranks, dict(directive.members))

    def made(self, move: Move) -> None:
        """Hear again what was not to be touched until this move was made.

        Now, as the next move may form the group anew: whatever is kept counts as of that formation.
        """
        if isinstance(move, Leave) or (isinstance(move, Resolve) and not move.is_joined):
            self.hear(move.directive)

    def hear(self, directive: Directive) -> bool:
        """Free what the directive says is not needed, or is worthless; True if anything was."""
        runtime, participant = self._runtime, self._participant
        # Other groups than those that this rank is in have no lease here.
        changed = runtime.apply_kept(
            [each for each in directive.kept if participant.rank in each.ranks]
        )
        if participant.wanted is directive and directive.stage.epoch > 0:
            bound = participant.binding.group.ranks if participant.binding is not None else ()
            whole = bound, runtime.migration.goal
            for ranks in self._sharers.take_lost(dict(directive.members), whole):
                changed |= runtime.keep_only(ranks, ())
        return changed

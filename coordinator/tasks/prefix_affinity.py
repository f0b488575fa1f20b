"""Which groups have read which beginnings of prompts, so that tasks go where they are cached.

A hint, as between cells: the group may have evicted a block since. Its memory ends with the group,
but a new process of a rank alone may have that of the one before it. Before they serve, leaders
report the blocks that a migration brings, with running tasks or as cached blocks. The pool and
placement call this module. Pure.
"""

from collections.abc import Sequence

from comm_pool.layout import Rank
from coordinator.protocol.prefixes import BLOCK_TOKENS, PrefixHistory
from coordinator.protocol.terms import Binding


class PrefixAffinity:
    """The blocks that each serving group has read, from its first placement on."""

    __slots__ = ("_coming", "_homes", "_inherited")

    def __init__(self) -> None:
        self._homes: dict[Rank, tuple[Binding, PrefixHistory]] = {}
        """By leader, which is a faster key than a binding."""
        self._coming: dict[Rank, PrefixHistory] = {}
        """Blocks that migrations brought to leaders of groups about to serve."""
        self._inherited: dict[Rank, PrefixHistory] = {}
        """What ranks have of their earlier processes, once they serve alone."""

    def __len__(self) -> int:
        """Return the number of remembered groups."""
        return len(self._homes)

    def cached(self, leader: Rank, prefixes: Sequence[int]) -> None:
        """Record that the next group that this rank leads begins with these blocks."""
        if prefixes:
            self._coming.setdefault(leader, PrefixHistory()).remember(prefixes)

    def inherit(self, rank: Rank) -> None:
        """Record that the next group of this rank alone begins with what its last one had."""
        known = self._homes.get(rank)
        if known is not None and known[0].group.ranks == (rank,):
            self._inherited[rank] = known[1]

    def remember(self, binding: Binding, prefixes: Sequence[int]) -> None:
        """Record that the group gets a prompt with these blocks."""
        if prefixes:
            self._home(binding).remember(prefixes)

    def matched_tokens(self, binding: Binding, prefixes: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens the group is known to have read."""
        return self._home(binding).matched(prefixes) * BLOCK_TOKENS if prefixes else 0

    def _home(self, binding: Binding) -> PrefixHistory:
        leader = binding.group.leader
        known = self._homes.get(leader)
        if known is not None and (known[0] is binding or known[0] == binding):
            return known[1]
        # The ranks of the new group have left their earlier groups.
        for each in [each for each, (old, _) in self._homes.items() if _share(old, binding)]:
            del self._homes[each]
        inherited = [self._inherited.pop(rank, None) for rank in binding.group.ranks]
        alone = inherited[0] if len(inherited) == 1 else None
        home = self._coming.pop(leader, None) or alone or PrefixHistory()
        self._homes[leader] = (binding, home)
        return home


def _share(one: Binding, other: Binding) -> bool:
    return not set(one.group.ranks).isdisjoint(other.group.ranks)

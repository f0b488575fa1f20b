"""Which groups have read which beginnings of prompts, so that a task goes where they are cached.

A hint, as between cells: a group that has read a block may have evicted it since. What a group
knows ends with it. What a move carries on, with running tasks or as cached blocks, its leaders
tell before they serve. Called by the pool and by placement. Pure.
"""

from collections.abc import Sequence

from comm_pool.layout import Rank
from coordinator.protocol.prefixes import BLOCK_TOKENS, SeenPrefixes
from coordinator.protocol.terms import Binding


class PrefixAffinity:
    """What each group that serves has read, from the moment that tasks are placed there."""

    __slots__ = ("_coming", "_homes")

    def __init__(self) -> None:
        self._homes: dict[Rank, tuple[Binding, SeenPrefixes]] = {}
        """By leader, which is found sooner than a binding."""
        self._coming: dict[Rank, SeenPrefixes] = {}
        """What moves have brought to leaders of groups that are about to serve."""

    def __len__(self) -> int:
        """Return how many groups are remembered."""
        return len(self._homes)

    def cached(self, leader: Rank, prefixes: Sequence[int]) -> None:
        """Take note that the next group that this rank leads begins with these blocks."""
        if prefixes:
            self._coming.setdefault(leader, SeenPrefixes()).came(prefixes)

    def came(self, binding: Binding, prefixes: Sequence[int]) -> None:
        """Take note that the group gets a prompt with these blocks."""
        if prefixes:
            self._home(binding).came(prefixes)

    def matched_tokens(self, binding: Binding, prefixes: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens the group has read, as far as is known."""
        return self._home(binding).matched(prefixes) * BLOCK_TOKENS if prefixes else 0

    def _home(self, binding: Binding) -> SeenPrefixes:
        leader = binding.group.leader
        known = self._homes.get(leader)
        if known is not None and (known[0] is binding or known[0] == binding):
            return known[1]
        # Its ranks have left whatever they were in before.
        for each in [each for each, (old, _) in self._homes.items() if _share(old, binding)]:
            del self._homes[each]
        home = self._coming.pop(leader, None) or SeenPrefixes()
        self._homes[leader] = (binding, home)
        return home


def _share(one: Binding, other: Binding) -> bool:
    return not set(one.group.ranks).isdisjoint(other.group.ranks)

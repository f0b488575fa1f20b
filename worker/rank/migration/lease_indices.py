"""Numbers that a migration gives to the new pages of a group. Pure."""

from collections.abc import Iterable

import numpy as np

from coordinator.protocol.terms import Binding
from kvadaptor.reshard.blocks import joined
from kvadaptor.reshard.terms import Ints


def fresh_indices(count: int, used: Iterable[Ints], num_pages: int) -> Ints:
    """Return the lowest lease indices, (count,), that no member of a group uses.

    `used` are those of each member. `num_pages` counts the pages of the member with fewest: its
    table has no more indices.
    """
    if not count:
        return np.zeros(0, dtype=np.int64)
    taken = joined(used)
    last = count + taken.size + 1
    is_free = np.ones(last + 1, dtype=np.bool_)
    is_free[0] = False
    is_free[taken[taken <= last]] = False
    fresh = np.flatnonzero(is_free)[:count]
    assert fresh[-1] < num_pages, "members hold too different leases: the lease indices run out."
    return fresh


def renumbered(blocks: Ints, binding: Binding, indices: Ints) -> Ints:
    """Map plan blocks to lease indices: the plan counts from 1, the group may use other indices."""
    width = binding.group.width
    if width == 1:
        return blocks
    return width * indices[blocks // width - 1] + blocks % width

"""How a layout becomes a target: which groups stay as they are. Called by the switcher."""

from collections.abc import Collection

from comm_pool.layout import Layout, Rank
from coordinator.protocol.messages import Binding, Target


def bind(layout: Layout, previous: Target, epoch: int, fresh: Collection[Rank]) -> Target:
    """Return the layout's groups; those of `previous` keep their formation unless a rank is fresh.

    New formations are born in `epoch`.
    """
    stays = {
        binding.group: binding
        for binding in previous.bindings
        if not set(fresh).intersection(binding.group.ranks)
    }
    return Target(
        tuple(stays[group] if group in stays else Binding(group, epoch) for group in layout.groups)
    )

"""Which pytest worker runs which tests: one worker has the real ranks, the others all else.

Real ranks compute on every core. Two cells at once make each other slow, and a cell beside tests
that mostly wait loses little. So the first worker takes the groups of tests that start ranks, one
after the other, and the others take the gateways' and the pure ones. Whoever runs out of its own
lane takes what the other lane still has.
"""

from collections.abc import Iterable
from typing import Any

from xdist.scheduler import LoadScopeScheduling

RANKS = "ranks"
"""Groups whose name begins so start real ranks."""


class LaneScheduling(LoadScopeScheduling):
    """xdist's scheduler of whole groups, with a lane of groups for the first worker."""

    def __init__(self, config: Any, log: Any = None) -> None:
        # Groups stay in the order of collection; xdist would begin with the one of most tests.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        """Return the group that xdist has written after the test's name, or its module."""
        module, _, name = nodeid.partition("::")
        _, mark, group = name[name.rfind("]") + 1 :].partition("@")
        return group if mark else module

    def _assign_work_unit(self, node: Any) -> None:
        scope = next_group(self.workqueue, is_first=node is self.nodes[0])
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def next_group(groups: Iterable[str], *, is_first: bool) -> str:
    """Return the group that a worker runs next: the first of its lane, else of the other."""
    waiting = list(groups)
    own = [group for group in waiting if group.startswith(RANKS) == is_first]
    return (own or waiting)[0]

"""Which pytest worker runs which tests: one worker has the real ranks, the others all else.

Real ranks compute on every core. Two cells at once make each other slow, and a cell beside tests
that mostly wait loses little. So the first worker takes the modules whose tests start ranks, one
after the other, and the others take the gateways' and the pure ones. Whoever runs out of its own
lane takes what the other lane still has.

A module says what it is in its `pytestmark`: `pytest.mark.ranks`, and `pytest.mark.xdist_group`
where it shares processes with other modules. The scheduler runs in a process that imports no test,
so it reads that from the source. xdist would write the group into the test's id, which pytest 9
does not let it change.
"""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[3]
RANKS = "ranks"
"""Groups whose name begins so start real ranks."""
GROUP = re.compile(r'pytest\.mark\.xdist_group\("([a-z-]+)"\)')


class LaneScheduling(LoadScopeScheduling):
    """xdist's scheduler of whole groups, with a lane of groups for the first worker."""

    def __init__(self, config: Any, log: Any = None) -> None:
        # Groups stay in the order of collection; xdist would begin with the one of most tests.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: Any) -> None:
        scope = next_group(self.workqueue, is_first=node is self.nodes[0])
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


@functools.cache
def group_of(module: str) -> str:
    """Return the group of a test module, a path from the root: its own, unless it shares one."""
    text = (ROOT / module).read_text()
    if found := GROUP.search(text):
        return found[1]
    return f"{RANKS}-{module}" if "pytest.mark.ranks" in text else module


def next_group(groups: Iterable[str], *, is_first: bool) -> str:
    """Return the group that a worker runs next: the first of its lane, else of the other."""
    waiting = list(groups)
    own = [group for group in waiting if group.startswith(RANKS) == is_first]
    return (own or waiting)[0]

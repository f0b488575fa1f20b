"""A step that is planned and sent before a group is left for a move, and computed a little later.

On CUDA a group is left with its last step under way, and what a switch needs is prepared beside it.
On CPU nothing is computed while the host does something else, so everything that a move is planned
from came behind the last step, and streams waited for it and for the first new step in one piece.
A held step comes between: the group is left, the move is told and planned, and only then its tokens
are computed. So one pause of a stream becomes two shorter ones.
"""

import time
from collections.abc import Callable
from typing import Any

from comm_pool.layout import Group

HOLD_LIMIT_S = 0.01
"""How long a step may wait to be computed: for others that leave, and for the plan of the move."""


class DeferredStep:
    """What waits for its computation; looks like vLLM's asynchronous output on CUDA."""

    def __init__(self, compute: Callable[[], Any], group: Group) -> None:
        """`group` is who computes it."""
        self.group = group
        self._compute = compute
        self._is_over = False
        self._held_s = time.monotonic()
        self.began_ns = 0
        """When it was begun to be computed, on the host's monotonic clock."""
        self.copy_event = self
        """vLLM's output has an event; both can be asked whether tokens are there."""

    def query(self) -> bool:
        """Whether nothing is left to compute; any thread may ask."""
        return self._is_over

    @property
    def is_late(self) -> bool:
        """Whether its tokens should not wait any longer."""
        return time.monotonic() - self._held_s > HOLD_LIMIT_S

    def get_output(self) -> Any:
        """Compute it; once. It is over even if that raises."""
        self.began_ns = time.monotonic_ns()
        try:
            return self._compute()
        finally:
            self._is_over = True

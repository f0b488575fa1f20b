"""The deferred step: sent before the group leaves for a migration, computed a little later.

On CUDA a rank leaves its group with the last step in flight and prepares the switch meanwhile. On
CPU the host cannot compute and prepare at once. Streams would pause for the last old step, the
planning and the first new step in one go. Deferring the last step until the manifest is published
and the migration is planned splits that into two shorter pauses.
"""

import time
from collections.abc import Callable
from typing import Any

from comm_pool.layout import Group

DEFER_LIMIT_S = 0.01
"""Maximum delay of a deferred step, for peers to leave and for the migration to be planned."""


class DeferredStep:
    """A planned step, not yet computed; has the interface of vLLM's asynchronous output on CUDA."""

    def __init__(self, compute: Callable[[], Any], group: Group) -> None:
        """`group` computes the step."""
        self.group = group
        self._compute = compute
        self._is_over = False
        self._deferred_s = time.monotonic()
        self.began_ns = 0
        """When its computation began, on the host's monotonic clock; 0 before that."""
        self.copy_event = self
        """Stands for the event of vLLM's output: callers query either one for the tokens."""

    def query(self) -> bool:
        """Return whether the step is over; any thread may call this."""
        return self._is_over

    @property
    def is_late(self) -> bool:
        """Whether the step has waited longer than `DEFER_LIMIT_S`."""
        return time.monotonic() - self._deferred_s > DEFER_LIMIT_S

    def get_output(self) -> Any:
        """Compute the step; call once. The step is over even if this raises."""
        self.began_ns = time.monotonic_ns()
        try:
            return self._compute()
        finally:
            self._is_over = True

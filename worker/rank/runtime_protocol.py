"""What a migration needs from the runtime of this rank's groups."""

from collections.abc import Sequence
from typing import Protocol

from comm_pool.layout import Group
from coordinator.protocol.terms import ReturnCause
from worker.rank.engine import EngineMode
from worker.rank.leases import Leases
from worker.rank.steps import StepOwner, Steps


class Runtime(StepOwner, Protocol):
    """The runtime as a migration sees it; `worker.rank.runtime` implements it."""

    steps: Steps
    leases: Leases

    def mode_of(self, group: Group) -> EngineMode:
        """Return the mode prepared for a group of this rank."""

    def give_up(
        self, group: Group, tasks: Sequence[str], cause: ReturnCause, *, keeps_pages: bool = ...
    ) -> None:
        """Return tasks to the pool with their tokens."""

    def hand_over(self, group: Group, tasks: Sequence[str]) -> None:
        """Forget tasks that another leader continues."""

"""What a migration needs from the runtime of this rank's groups."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from comm_pool.layout import Group
from coordinator.protocol.terms import Binding, ReturnCause
from worker.rank.engine import EngineMode
from worker.rank.steps import StepOwner, Steps


class Runtime(StepOwner, Protocol):
    """The runtime as a migration sees it; `worker.rank.runtime` implements it."""

    steps: Steps

    def mode_of(self, group: Group) -> EngineMode:
        """Return the mode prepared for a group of this rank."""

    def prepared(self, binding: Binding, indices: npt.NDArray[np.int64]) -> None:
        """Note that a migration has leased these indices to a group about to be joined."""

    def not_joined(self) -> None:
        """Drop the preparation for a group that this rank does not join."""

    def give_up(
        self, group: Group, tasks: Sequence[str], cause: ReturnCause, *, keeps_pages: bool = ...
    ) -> None:
        """Return tasks to the pool with their tokens."""

    def hand_over(self, group: Group, tasks: Sequence[str]) -> None:
        """Forget tasks that another leader continues."""

    def withdraw(self, group: Group) -> None:
        """Release the pages of a parked group that no task holds."""

"""A simulated cell whose arrangement is a function of time, for those who know the load."""

from collections.abc import Callable

from coordinator.model.cost_model import CostModel
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.candidates import Arrangement, LayoutSpace
from tools.simulator.cell import SimCell

Plan = Callable[[float], Arrangement]
"""Seconds since the start -> the arrangement that is wanted then."""


class PlannedCell(SimCell):
    """A cell that is laid out by a plan."""

    def __init__(
        self, plan: Plan, costs: CostModel, settings: PolicySettings, space: LayoutSpace
    ) -> None:
        self._plan = plan
        first = plan(0.0)
        super().__init__(first.layout, costs, settings, space)
        self._here = first

    def _decide(self) -> None:
        wanted = self._plan(self._now_s)
        if self._target is None and wanted != self._here:
            self._change(wanted, "it is planned")

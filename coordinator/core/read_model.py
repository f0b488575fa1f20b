"""The read model of a core, for the admin API and metrics; the core inherits it."""

from comm_pool.layout import Rank, format_layout
from coordinator.core import views
from coordinator.model.records import DecisionLog
from coordinator.model.settings import CoreSettings
from coordinator.policy.controller import PolicyController
from coordinator.ranks.roster import Roster
from coordinator.switching.switcher import Switcher
from coordinator.tasks.task_pool import TaskPool


class CoreViews:
    """Views of a core's parts; reading them changes nothing."""

    __slots__ = ("_decisions", "_pool", "_roster", "_settings", "_steering", "_switcher")

    def __init__(
        self,
        settings: CoreSettings,
        roster: Roster,
        switcher: Switcher,
        pool: TaskPool,
        decisions: DecisionLog,
        steering: PolicyController | None = None,
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._switcher = switcher
        self._pool = pool
        self._decisions = decisions
        self._steering = steering

    @property
    def epoch(self) -> int:
        """The epoch of the target; 0 before the first one."""
        return self._switcher.epoch

    @property
    def target_name(self) -> str:
        """The wanted layout, in its notation."""
        return format_layout(self._switcher.target.layout, self._roster.world)

    @property
    def is_serving(self) -> bool:
        """Every rank of the target serves it."""
        return self._switcher.is_serving

    @property
    def is_recovering(self) -> bool:
        """The core is still collecting the ranks' reports."""
        return self._switcher.recovering

    @property
    def modes_out(self) -> frozenset[str]:
        """The modes that are quarantined somewhere, such as `tp2`."""
        return self._roster.guard.modes_out()

    def is_available(self, rank: Rank) -> bool:
        """Return whether the rank is in the target, and so not cut out."""
        return rank in self._switcher.alive

    def layout(self) -> views.View:
        """Answer `GET /admin/layout`."""
        return views.layout_view(self._switcher, self._roster)

    def ranks(self, now_ms: int) -> views.View:
        """Answer `GET /admin/ranks`."""
        return views.ranks_view(self._switcher, self._roster, self._settings.lease_ms, now_ms)

    def switches(self, last: int) -> views.View:
        """Answer `GET /admin/switches`."""
        return {"switches": [views.switch_view(each) for each in self._switcher.log.last(last)]}

    def decisions(self, last: int) -> views.View:
        """Answer `GET /admin/decisions`."""
        return {"decisions": [views.decision_view(each) for each in self._decisions.last(last)]}

    def alternation(self) -> views.View | None:
        """Return the alternation of batch work within `GET /admin/decisions`, if there can be."""
        return views.alternation_view(self._steering.alternation) if self._steering else None

    def step_times(self) -> views.View:
        """Return the start-up measurements within `GET /admin/decisions`."""
        return views.step_times_view(self._roster)

    def queue(self) -> views.View:
        """Return the unfinished tasks by tier and state."""
        return views.queue_view(self._pool.tasks)

"""A world in which little breaks, so that every switch has to go as its plan says.

Faults hide what a missing rule does: a rank that waits for ever is cut out like one that was lost,
and its tasks are computed again like those of the dead.
"""

from collections.abc import Callable

from comm_pool.layout import Layout, Rank
from coordinator.core.core import Core
from coordinator.model.events import Effect, Event, SwitchRecorded
from coordinator.model.records import Outcome, SwitchRecord
from coordinator.protocol.terms import Carry
from tests.simulation.checkers import check
from tests.simulation.world import World

TASK_MS = 6_000
"""No task runs longer."""
SWITCH_LIMIT_MS = {
    Carry.PAUSE: 1_000,
    Carry.DRAIN: 1_000,
    Carry.RECOMPUTE: 1_000,
    Carry.RESHARD: 2_000,
    Carry.SPECULATE: 5_000,
}
"""How long a switch may take; a drain waits for tasks before."""


class CalmWorld(World):
    """No rank that lives is cut out, no switch takes long, and drains wait for their tasks."""

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        meddle: float | None = None,
        **kind: bool,
    ) -> None:
        super().__init__(seed, trace, meddle, **kind)
        self.faults.calm()
        self._target: dict[Rank, int] = {}
        """The ranks of the target that live, with their incarnations."""
        self._overtakes = False
        """The last switch did not end: what it began is not waited for."""
        self._changed_plan_in = 0
        """The last epoch whose plan was changed on the way: its record has the first plan."""

    def want_switch(self, layout: Layout, carry: Carry) -> None:
        """Want a layout; the switch to it that is under way gets another plan."""
        if self.core is not None and layout == self.core._switcher.target.layout:
            self._changed_plan_in = self.core._switcher.epoch
        super().want_switch(layout, carry)

    def effects_of(self, core: Core, event: Event) -> list[Effect]:
        """Let the coordinator handle an event, and check what it has cut out and switched."""
        effects = super().effects_of(core, event)
        living = {each.rank: each.incarnation for each in self.alive}
        named = [rank for rank in living if core.views.is_available(rank)]
        target = {rank: core._roster[rank].incarnation for rank in named}
        gone = [rank for rank in self._target if rank not in target]
        gone = [rank for rank in gone if living.get(rank) == self._target[rank]]
        check(not gone, f"ranks {gone} are cut out, though they live")
        self._target = target
        for effect in effects:
            if isinstance(effect, SwitchRecorded):
                self._check_switch(effect.record)
        return effects

    def _check_switch(self, record: SwitchRecord) -> None:
        overtakes, self._overtakes = self._overtakes, record.outcome is not Outcome.SERVED
        is_as_planned = record.epoch != self._changed_plan_in
        if self._overtakes or self.stats.crashes or not is_as_planned:
            return
        waited_ms = self.settings.drain_limit_ms if record.carry is Carry.DRAIN else 0
        limit_ms = min(waited_ms, TASK_MS) + SWITCH_LIMIT_MS[record.carry]
        layouts = f"{record.from_layout} to {record.to_layout}"
        took = f"{record.carry} from {layouts} took {record.total_ms} ms"
        check(record.total_ms <= limit_ms, f"{took}, though nothing broke")
        if not overtakes and record.total_ms < waited_ms:
            check(not record.tasks[Carry.RECOMPUTE], f"{took}, and tasks were not waited for")

"""Whether there is room for a rank's steps on its device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank


class Room:
    """What one rank knows of it."""

    def __init__(self, process: "SimRank") -> None:
        self._process = process
        self._lacked_in = 0
        self._since: dict[int, int] = {}

    @property
    def lacked_in(self) -> int:
        """The formation in which a step found no room, until the rank serves in another one."""
        participant = self._process.participant
        has_gone_on = (
            participant.binding is not None and participant.binding.formation > self._lacked_in
        )
        return 0 if has_gone_on and participant.serving else self._lacked_in

    def lacked_since(self, formation: int) -> int | None:
        """When a step of this formation found no room, whatever the rank tells of it by now."""
        return self._since.get(formation)

    def run_out(self) -> bool:
        """Let the rank come out of the step that it is in; returns whether it was in one."""
        process, binding = self._process, self._process.participant.binding
        engine = process.holdings.engine
        under_way = [*(engine.in_flight if engine else ()), *filter(None, (process.step,))]
        steps = [step for step in under_way if step.binding == binding]
        if binding is None or not steps:
            return False
        process.world.say(f"rank {process.rank} has no room for its step in {binding}")
        self._lacked_in = binding.formation
        self._since[binding.formation] = process.world.now
        for step in steps:
            process.world.steps.forsake(step, process.rank)
        process.step = None
        if engine is not None:
            engine.drop_steps()
        process.come_out(binding.formation)
        return True

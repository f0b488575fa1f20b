"""Whether there is room for a rank's steps on its device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank


class Room:
    """What one rank knows of it."""

    def __init__(self, process: "SimRank") -> None:
        self._process = process
        self._lacked_in = 0

    @property
    def lacked_in(self) -> int:
        """The formation in which a step found no room, until the rank has joined another one."""
        binding = self._process.seat.binding
        return self._lacked_in if binding is None or binding.born <= self._lacked_in else 0

    def run_out(self) -> bool:
        """Let the rank come out of the step that it is in; returns whether it was in one."""
        process, binding = self._process, self._process.seat.binding
        engine = process.holdings.engine
        under_way = [*(engine.in_flight if engine else ()), *filter(None, (process.step,))]
        steps = [step for step in under_way if step.binding == binding]
        if binding is None or not steps:
            return False
        process.world.say(f"rank {process.rank} has no room for its step in {binding}")
        self._lacked_in = binding.born
        for step in steps:
            process.world.steps.forsake(step)
        process.step = None
        if engine is not None:
            engine.drop_steps()
        process.come_out(binding.born)
        return True

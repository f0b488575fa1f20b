"""What a rank does when the group that it is in has lost a member: it gets out, alive.

The step that was under way does not count. A leader gives its tasks back at once, with the tokens
that were delivered, and plans no further step; a follower follows none. Both wait for the directive
that forms the group anew without whoever was lost: they have all weights, so they serve on alone.

A rank whose step finds no room on its device does the same, also if it is alone: it calls the
others out, tells of it in its reports, and is left out for a while as the process that it is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import structlog

from comm_pool.formations import PeerLostError
from coordinator.protocol.switch_actions import Leave, Move
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, ReturnCause
from worker.engine.mode import NoRoomError
from worker.rank.runtime import GroupRuntime

T = TypeVar("T")

log = structlog.get_logger()


class FormationAbort:
    """Whether the joined formation was aborted, and what follows from it; the main loop's."""

    def __init__(self, participant: SwitchParticipant, runtime: GroupRuntime) -> None:
        self._participant = participant
        self._runtime = runtime
        self._communicators = runtime.engine.communicators
        self._no_room = 0
        self._told = 0

    @property
    def oom_formation(self) -> int:
        """The formation in which a step found no room, until the rank serves in another.

        A rank may leave and join within one pass, and the others still wait in that step. It serves
        only when the coordinator has heard that it has joined, and has heard this with it.
        """
        participant = self._participant
        has_gone_on = (
            participant.binding is not None and participant.binding.formation > self._no_room
        )
        return 0 if has_gone_on and participant.serving else self._no_room

    @property
    def has_news(self) -> bool:
        """Whether `oom_formation` is something else than what was told last."""
        return self.oom_formation != self._told

    def tell(self) -> int:
        """Return `oom_formation`, for a report that is sent."""
        self._told = self.oom_formation
        return self._told

    @property
    def is_joined(self) -> bool:
        """The rank is joined to a formation that was aborted: no step of it counts any more."""
        binding = self._participant.binding
        if binding is None:
            return False
        is_aborted = self._communicators.is_aborted(binding.group.ranks, binding.formation)
        return is_aborted or binding.formation == self._no_room

    def is_noticed(self) -> bool:
        """Look whether `is_joined`; a follower need not hear from its leader then."""
        binding = self._participant.binding
        if binding is None or not self.is_joined:
            return False
        self._participant.on_leave(binding.formation)
        return True

    def guarded(self, step: Callable[[], T]) -> T | None:
        """Take part in a step; None if the formation turned out to be lost meanwhile.

        Of a formation that was left before, it still raises.
        """
        try:
            return step()
        except PeerLostError as error:
            binding = self._participant.binding
            if binding is None or binding.formation != error.formation:
                raise
            log.warning("step_aborted", group=binding.group.name, reason=str(error))
        except NoRoomError as error:
            binding = self._participant.binding
            if binding is None:
                raise
            advice = "the rank is left out for a while; see what else takes the device's memory"
            log.warning(
                "step_without_room", group=binding.group.name, reason=str(error), advice=advice
            )
            self._no_room = binding.formation
        self._give_up(binding)
        return None

    def _give_up(self, binding: Binding) -> None:
        # Its mark is for all of them, who may not have heard of the loss.
        self._communicators.abort(binding.group.ranks, binding.formation)
        self._forget_steps(binding)
        if self._participant.is_leader:
            scheduler = self._runtime.mode_of(binding.group).scheduler
            assert scheduler is not None
            tasks = list(scheduler.requests)
            self._runtime.give_up(binding.group, tasks, ReturnCause.RECOMPUTE)

    def judged(self, move: Move | None) -> Move | None:
        """Leaving an aborted formation is leaving a lost one, whatever the directive knows."""
        if isinstance(move, Leave) and self.is_joined:
            self._forget_steps(move.binding)
            return replace(move, group_lost=True)
        return move

    def _forget_steps(self, binding: Binding) -> None:
        """What the runner knows of the group's tasks is that of a step which never ended."""
        self._runtime.steps.drop(binding.formation)
        mode = self._runtime.mode_of(binding.group)
        mode.runner.forget_tasks()
        if mode.scheduler is not None:
            mode.scheduler.forget_steps()

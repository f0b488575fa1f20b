"""What a rank does when its group has lost a member: it aborts the formation and stays alive.

The in-flight step does not count. A leader returns its tasks at once, with the tokens already
delivered, and plans no further step; a follower executes none. Both then wait for the directive
that forms groups without the lost rank. A rank whose step runs out of device memory does the same,
even when alone: it aborts the formation for its peers and reports it, and the coordinator ejects
the rank for a while.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import structlog

from comm_pool.formations import PeerLostError
from coordinator.protocol.switch_actions import Leave, Move
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, ReturnCause
from worker.rank.engine import NoRoomError
from worker.rank.runtime import GroupRuntime

T = TypeVar("T")

log = structlog.get_logger()


class FormationAbort:
    """Detects that the joined formation was aborted, and acts on it; for the main loop only."""

    def __init__(self, participant: SwitchParticipant, runtime: GroupRuntime) -> None:
        self._participant = participant
        self._runtime = runtime
        self._communicators = runtime.engine.communicators
        self._no_room = 0
        self._last_report = 0

    @property
    def oom_formation(self) -> int:
        """The formation in which a step ran out of memory, until the rank serves in a later one.

        A rank may leave and join within one pass while its peers still wait in that step. It serves
        only after the coordinator has received the report of its join, which carries this value.
        """
        participant = self._participant
        has_gone_on = (
            participant.binding is not None and participant.binding.formation > self._no_room
        )
        return 0 if has_gone_on and participant.serving else self._no_room

    @property
    def has_news(self) -> bool:
        """Whether `oom_formation` has changed since it was last reported."""
        return self.oom_formation != self._last_report

    def tell(self) -> int:
        """Return `oom_formation` for a report, and note that it was reported."""
        self._last_report = self.oom_formation
        return self._last_report

    @property
    def is_joined(self) -> bool:
        """Whether the rank is joined to an aborted formation: no step of it counts any more."""
        binding = self._participant.binding
        if binding is None:
            return False
        is_aborted = self._communicators.is_aborted(binding.group.ranks, binding.formation)
        return is_aborted or binding.formation == self._no_room

    def is_noticed(self) -> bool:
        """Return `is_joined`; if true, a follower no longer needs its leader's leave message."""
        binding = self._participant.binding
        if binding is None or not self.is_joined:
            return False
        self._participant.on_leave(binding.formation)
        return True

    def guarded(self, step: Callable[[], T]) -> T | None:
        """Run a part of a step; return None if that aborted the joined formation.

        Raises `PeerLostError` if the error belongs to an earlier formation.
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
            advice = "the coordinator ejects the rank for a while; check what else uses its device"
            log.warning(
                "step_without_room", group=binding.group.name, reason=str(error), advice=advice
            )
            self._no_room = binding.formation
        self._give_up(binding)
        return None

    def _give_up(self, binding: Binding) -> None:
        # The mark is for all members: they may not know of the loss.
        self._communicators.abort(binding.group.ranks, binding.formation)
        self._forget_steps(binding)
        if self._participant.is_leader:
            scheduler = self._runtime.mode_of(binding.group).scheduler
            assert scheduler is not None
            tasks = list(scheduler.requests)
            self._runtime.give_up(binding.group, tasks, ReturnCause.RECOMPUTE)

    def check(self, move: Move | None) -> Move | None:
        """Return the action, with `group_lost` set if it leaves an aborted formation."""
        if isinstance(move, Leave) and self.is_joined:
            self._forget_steps(move.binding)
            return replace(move, group_lost=True)
        return move

    def _forget_steps(self, binding: Binding) -> None:
        """Drop the runner's state of the group's tasks: its last step never ended."""
        self._runtime.steps.drop(binding.formation)
        self._runtime.mode_of(binding.group).forget_steps()

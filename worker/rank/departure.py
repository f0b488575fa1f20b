"""Aligns when leaders leave their groups for a migration.

Tasks of the group that leaves first wait for the last group. So a leader whose step ends long
before those of its future peers computes one more step meanwhile. Step ends then lie within half a
step of each other. Each mailbox holds the end that its owner expects. Used by the rank's main loop
alone.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from comm_pool.mailbox import RankMailbox
from coordinator.protocol.switch_actions import Leave, Move
from coordinator.protocol.terms import Carry

if TYPE_CHECKING:
    from worker.rank.runtime import GroupRuntime

STEPS_MAX = 3
"""Maximum extra steps of a rank that is asked to leave: the ends that peers expect may be wrong."""


def is_worth_a_step(own_end_ns: int, step_ns: int, other_ends_ns: Iterable[int]) -> bool:
    """Return whether one more step would end closer to the latest peer's end than the current one.

    `step_ns` is the usual duration of a step; 0 means unknown, and then the answer is no.
    """
    gap_ns = max(other_ends_ns, default=0) - own_end_ns
    return step_ns > 0 and gap_ns > step_ns / 2


def _end(mailbox: RankMailbox, epoch: int) -> int:
    """Return when the mailbox owner's last step is expected to end; 0 if it is known to be over."""
    is_over = mailbox.epoch == epoch and mailbox.is_settled
    return 0 if is_over else mailbox.ends_ns


class Departure:
    """Delays leaving by at most `STEPS_MAX` steps."""

    def __init__(self, runtime: "GroupRuntime", rank: Rank) -> None:
        self._runtime = runtime
        self._rank = rank
        self._epoch = 0
        self._steps = 0
        self._deferred_in = 0

    def is_put_off(self, move: Move | None) -> bool:
        """Return whether the rank runs another step before this action; counts that step."""
        if not isinstance(move, Leave) or not move.is_leader or move.group_lost:
            return False
        epoch = move.directive.stage.epoch
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, 0
        to_be = move.directive.target.binding_of(self._rank)
        if move.carry is not Carry.RESHARD or to_be is None or self._steps >= STEPS_MAX:
            return False
        mailboxes = self._runtime.engine.mailboxes
        others = set(to_be.group.ranks).difference(move.binding.group.ranks)
        steps = self._runtime.steps
        worth = self._decodes_only and is_worth_a_step(
            max(steps.ends_ns, time.monotonic_ns()),
            steps.decode_ns,
            (_end(mailboxes[rank], epoch) for rank in others if rank in mailboxes),
        )
        self._steps += worth
        return worth

    def defers_step_for(self, move: Leave) -> bool:
        """Return, once per epoch, whether to plan and defer a last step before this action."""
        engine, steps = self._runtime.engine, self._runtime.steps
        epoch = move.directive.stage.epoch
        is_moved = move.is_leader and move.carry is Carry.RESHARD and not move.group_lost
        if not (is_moved and engine.holds_steps) or self._deferred_in == epoch:
            return False
        mode = self._runtime.selected
        if steps.has_inflight or mode is None or mode.scheduler is None:
            return False
        if not (self._decodes_only and mode.scheduler.reads_no_prompt):
            return False
        self._deferred_in = epoch
        return True

    @property
    def _decodes_only(self) -> bool:
        """Whether only decodes would run: a prompt would outlast the wait that it fills."""
        mode = self._runtime.selected
        if mode is None or mode.scheduler is None:
            return False
        running, waiting = mode.scheduler.get_request_counts()
        return bool(running) and not waiting

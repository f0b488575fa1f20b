"""Aligns when leaders leave their groups for a migration.

Tasks of the group that leaves first wait for the last group. So a leader whose step ends long
before those of its future peers computes one more step meanwhile. Step ends then lie within half a
step of each other. Each mailbox holds the end that its owner expects. Only the rank's core
uses this.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.switch_actions import Leave
from coordinator.protocol.terms import Carry
from kvadaptor.transfer.mailbox import RankMailbox

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

    def is_put_off(self, leave: Leave, now_ns: int) -> bool:
        """Return whether the rank runs another step before it leaves."""
        if not leave.is_leader or leave.group_lost or leave.carry is not Carry.RESHARD:
            return False
        epoch = leave.directive.stage.epoch
        to_be = leave.directive.target.binding_of(self._rank)
        if to_be is None or (epoch == self._epoch and self._steps >= STEPS_MAX):
            return False
        mailboxes = self._runtime.engine.mailboxes
        others = set(to_be.group.ranks).difference(leave.binding.group.ranks)
        steps = self._runtime.steps
        return self._decodes_only and is_worth_a_step(
            max(steps.ends_ns, now_ns),
            steps.decode_ns,
            (_end(mailboxes[rank], epoch) for rank in others if rank in mailboxes),
        )

    def put_off(self, leave: Leave) -> None:
        """Note that the rank runs another step before it leaves."""
        epoch = leave.directive.stage.epoch
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, 0
        self._steps += 1

    def may_defer_step(self, leave: Leave) -> bool:
        """Return whether to plan and defer a last step before the rank leaves: once per epoch."""
        engine, steps = self._runtime.engine, self._runtime.steps
        is_moved = leave.is_leader and leave.carry is Carry.RESHARD and not leave.group_lost
        is_deferred = self._deferred_in == leave.directive.stage.epoch
        if not (is_moved and engine.holds_steps) or is_deferred:
            return False
        mode = self._runtime.selected
        if steps.has_inflight or mode is None or mode.scheduler is None or mode.stages > 1:
            return False
        return self._decodes_only and mode.scheduler.reads_no_prompt

    def defer_step(self, leave: Leave) -> None:
        """Note that the last step before the rank leaves is deferred."""
        self._deferred_in = leave.directive.stage.epoch

    @property
    def _decodes_only(self) -> bool:
        """Whether only decodes would run: a prompt would outlast the wait that it fills."""
        mode = self._runtime.selected
        if mode is None or mode.scheduler is None:
            return False
        running, waiting = mode.scheduler.get_request_counts()
        return bool(running) and not waiting

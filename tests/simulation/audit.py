"""The auditor: which invariant is checked where, and the checks that need the whole world.

I1 every accepted request ends once     `checkers.Stream.finish`, `rest.check_rest`
I2 tokens without gap, repeat or change `checkers.Stream.deliver` behind the real `TokenStream`
I3 one group and epoch per rank         `StageChecker`, `check_one_leads`, `World.check_may_start`
I4 no mixed collective                  `check_agreement`, equal leases and KV in `Holdings.execute`
I5 the queue is bounded                 `QueueAudit`; the order of tiers: `test_task_queue.py`
I6 all comes to rest once faults heal   `rest.unrest_of`
"""

from coordinator.core.core import Core
from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.gateway import Submit
from coordinator.protocol.terms import Tier
from tests.simulation.checkers import check


class QueueAudit:
    """No submission makes the queue longer than its bounds."""

    def __init__(self, core: Core, bounds: QueueBounds, message: Submit) -> None:
        self._core, self._bounds, self._message = core, bounds, message
        self._was_known = message.header.task in core._pool.tasks
        self._before = self._counts()

    def check(self) -> None:
        message = self._message
        if self._was_known or message.attempt or message.delivered_tokens:
            # What a client has seen tokens of is never turned away.
            return
        limits = {tier: self._bounds.of(tier).tasks_max for tier in Tier}
        for tier, count in self._counts().items():
            bound = self._bounds.tasks_max if tier is None else limits[tier]
            before = self._before[tier]
            check(
                bound is None or count <= max(before, bound),
                f"{count} tasks of tier {tier} wait where {bound} may, before it were {before}",
            )

    def _counts(self) -> dict[Tier | None, int]:
        queue = self._core._pool.tasks.queue
        return {None: len(queue), **{tier: queue.count(tier) for tier in Tier}}

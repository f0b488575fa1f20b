"""Which task is turned away when too many wait, and when another try is worth it.

Every tier has a bound of its own and all of them share one. Over its own bound a tier turns away
the newest task of the tenant that has most of it queued; over the common bound the lowest tier
gives way to the one that came. A task that a client has seen tokens of is never turned away.
Called by the task pool. Pure.
"""

from collections import deque

from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.gateway import TaskFailed
from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.task import Task
from coordinator.tasks.task_queue import TaskQueue
from coordinator.tasks.task_table import TaskTable

RETRY_AFTER_MAX_S = 60
"""Clients of OpenAI's libraries do not obey a longer wait."""

RETRY_AFTER_STALLED_S = 10
"""Answered while nothing is placed, so that nobody can say how long the queue takes."""

RATE_WINDOW_MS = 10_000
"""Placements of this long say how fast the queue drains."""

PLACEMENTS_COUNTED_MAX = 1_024


class Shedding:
    """Bounds the queue of a task pool; knows how fast it drains."""

    __slots__ = ("_bounds", "_placed_ms", "has_groups")

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self._placed_ms: deque[int] = deque(maxlen=PLACEMENTS_COUNTED_MAX)
        self.has_groups = False
        """Whether there were groups to place into when it was last tried."""

    def placed(self, now_ms: int) -> None:
        """Count a placement."""
        self._placed_ms.append(now_ms)

    def make_room(self, tasks: TaskTable, new: Task, now_ms: int) -> TaskFailed | None:
        """Return who must go so that `new` can wait, maybe itself; None if there is room."""
        queue, tier = tasks.queue, new.header.tier
        tier_max = self._bounds.of(tier).tasks_max
        retry_s = self.retry_after_s(queue, tier, now_ms)
        if tier_max is not None and queue.count(tier) >= tier_max:
            reason = f"{queue.count(tier)} requests of this tier are waiting already."
            return TaskFailed(_of_longest_line(tasks, new), "queue_full", reason, retry_s)
        if len(queue) < self._bounds.tasks_max:
            return None
        for lower in sorted(Tier, reverse=True):
            if lower <= tier:
                break
            if victim := _newest(tasks, lower, queue.longest(lower)):
                reason = "more urgent requests took its place in the queue."
                retry_s = self.retry_after_s(queue, lower, now_ms)
                return TaskFailed(victim, "tier_capacity", reason, retry_s)
        reason = f"{len(queue)} requests are waiting already."
        return TaskFailed(_of_longest_line(tasks, new), "queue_full", reason, retry_s)

    def overdue(self, tasks: TaskTable, now_ms: int) -> list[TaskFailed]:
        """Return the tasks that have waited too long for their first placement."""
        found = []
        for tier in Tier:
            wait_ms = self._bounds.of(tier).wait_ms
            if wait_ms is None or not tasks.queue.count(tier):
                continue
            late = [
                task for task in tasks.queue.overdue(tier, now_ms - wait_ms) if tasks[task].is_fresh
            ]
            code = "tier_capacity" if self.has_groups else "no_healthy_workers"
            why = "all groups are busy" if self.has_groups else "no group serves"
            reason = f"the request has waited for {wait_ms / 1000:.1f} s: {why}."
            retry_s = self.retry_after_s(tasks.queue, tier, now_ms)
            found += [TaskFailed(task, code, reason, retry_s) for task in late]
        return found

    def retry_after_s(self, queue: TaskQueue, tier: Tier, now_ms: int) -> int:
        """Return when a task of this tier that comes now would be placed, within bounds."""
        while self._placed_ms and self._placed_ms[0] < now_ms - RATE_WINDOW_MS:
            self._placed_ms.popleft()
        if not self._placed_ms:
            return RETRY_AFTER_STALLED_S
        span_ms = max(now_ms - self._placed_ms[0], 1_000)
        ahead = sum(queue.count(each) for each in Tier if each <= tier)
        wait_ms = ahead * span_ms // len(self._placed_ms)
        return min(max(-(-wait_ms // 1_000), 1), RETRY_AFTER_MAX_S)


def _of_longest_line(tasks: TaskTable, new: Task) -> TaskId:
    """Return the new task, unless another tenant has more of the tier queued than its own."""
    queue, tier, tenant = tasks.queue, new.header.tier, new.header.tenant
    longest = queue.longest(tier)
    if longest is None or longest == tenant:
        return new.id
    if queue.count_of(tier, longest) <= queue.count_of(tier, tenant) + 1:
        return new.id
    return _newest(tasks, tier, longest) or new.id


def _newest(tasks: TaskTable, tier: Tier, tenant: str | None) -> TaskId | None:
    if tenant is None:
        return None
    newest = tasks.queue.newest_first(tier, tenant)
    return next((task for task in newest if tasks[task].is_fresh), None)

"""Which task is refused when too many wait, and when a client should try again. Pure.

Each tier has a bound and all tiers share one. Above its own bound a tier refuses the newest task of
the tenant with the most queued tasks; above the common bound the lowest tier gives way to the
newcomer. A task is never refused once its client has seen tokens. The task pool calls this module.
"""

from collections import deque

from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.gateway import TaskFailed
from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.task import Task
from coordinator.tasks.task_queue import TaskQueue
from coordinator.tasks.task_table import TaskTable

RETRY_AFTER_MAX_S = 60
"""Clients of OpenAI's libraries ignore a longer wait."""

RETRY_AFTER_STALLED_S = 10
"""The answer while nothing is placed, so that the queue's pace is unknown."""

RATE_WINDOW_MS = 10_000
"""The window of placements that measures how fast the queue drains."""

PLACEMENTS_COUNTED_MAX = 1_024


class Shedding:
    """Bounds the queue of a task pool and measures how fast it drains."""

    __slots__ = ("_placed_ms", "bounds", "has_groups")

    def __init__(self, bounds: QueueBounds) -> None:
        self.bounds = bounds
        """May change while tasks wait."""
        self._placed_ms: deque[int] = deque(maxlen=PLACEMENTS_COUNTED_MAX)
        self.has_groups = False
        """Whether the last round had groups to place into."""

    def placed(self, now_ms: int) -> None:
        """Count a placement."""
        self._placed_ms.append(now_ms)

    def make_room(self, tasks: TaskTable, new: Task, now_ms: int) -> TaskFailed | None:
        """Return the task to refuse so that `new` can wait, maybe `new`; None if there is room."""
        queue, tier = tasks.queue, new.header.tier
        tier_max = self.bounds.of(tier).tasks_max
        retry_s = self.retry_after_s(queue, tier, now_ms)
        if tier_max is not None and queue.count(tier) >= tier_max:
            reason = (
                f"{queue.count(tier)} requests of this tier are waiting already: try again later."
            )
            return TaskFailed(_of_longest_line(tasks, new), "queue_full", reason, retry_s)
        if len(queue) < self.bounds.tasks_max:
            return None
        for lower in sorted(Tier, reverse=True):
            if lower <= tier:
                break
            if victim := _newest(tasks, lower, queue.longest(lower)):
                reason = "more urgent requests took its place in the queue: try again later."
                retry_s = self.retry_after_s(queue, lower, now_ms)
                return TaskFailed(victim, "tier_capacity", reason, retry_s)
        reason = f"{len(queue)} requests are waiting already: try again later."
        return TaskFailed(_of_longest_line(tasks, new), "queue_full", reason, retry_s)

    def overdue(self, tasks: TaskTable, now_ms: int) -> list[TaskFailed]:
        """Return the tasks that exceeded the wait limit for their first placement."""
        found = []
        for tier in Tier:
            wait_ms = self.bounds.of(tier).wait_ms
            if wait_ms is None or not tasks.queue.count(tier):
                continue
            late = [
                task for task in tasks.queue.overdue(tier, now_ms - wait_ms) if tasks[task].is_fresh
            ]
            code = "tier_capacity" if self.has_groups else "no_healthy_workers"
            why = "all groups are busy" if self.has_groups else "no group serves"
            reason = f"{why}, and the request waited for {wait_ms / 1000:.1f} s: try again later."
            retry_s = self.retry_after_s(tasks.queue, tier, now_ms)
            found += [TaskFailed(task, code, reason, retry_s) for task in late]
        return found

    def retry_after_s(self, queue: TaskQueue, tier: Tier, now_ms: int) -> int:
        """Return when a task of this tier that arrives now would be placed, within bounds."""
        while self._placed_ms and self._placed_ms[0] < now_ms - RATE_WINDOW_MS:
            self._placed_ms.popleft()
        if not self._placed_ms:
            return RETRY_AFTER_STALLED_S
        span_ms = max(now_ms - self._placed_ms[0], 1_000)
        ahead = sum(queue.count(each) for each in Tier if each <= tier)
        wait_ms = ahead * span_ms // len(self._placed_ms)
        return min(max(-(-wait_ms // 1_000), 1), RETRY_AFTER_MAX_S)


def _of_longest_line(tasks: TaskTable, new: Task) -> TaskId:
    """Return the new task, or the newest of a tenant that has more of the tier queued."""
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

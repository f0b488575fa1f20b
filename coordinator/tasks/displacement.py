"""Which batch tasks make room for an urgent one, where no group has any. Pure.

Batch tasks fill all KV that there is, and hold it for as long as they decode. An urgent task that
found no room for `DISPLACE_AFTER_MS` takes it from the newest of them, in the group in which the
fewest tokens have to be computed again. They go back to the queue, and continue after the tokens
that they have; blocks that nobody needed meanwhile, and host pages, are not computed again. The
task pool calls this module.
"""

from collections.abc import Iterable, Sequence

from coordinator.protocol.terms import Tier
from coordinator.tasks.placement import OpenGroup, foreign_to
from coordinator.tasks.task import Task
from coordinator.tasks.task_table import TaskTable

DISPLACE_AFTER_MS = 100
"""Room often comes by itself sooner than that, as tasks end."""

LOOK_EVERY_MS = 50
"""Least time between two looks: each goes through the tasks of the groups."""

LOOK_AHEAD_TASKS = 8
"""Urgent tasks that are looked at, in the order of the queue."""


def displaced(tasks: TaskTable, groups: Sequence[OpenGroup], now_ms: int) -> list[Task]:
    """Return the batch tasks to take back, newest first; none if no urgent task waits for room."""
    if not any(tasks.queue.count(tier) for tier in Tier if tier is not Tier.BATCH):
        return []
    waiting = tasks.queue.in_order(now_ms, {Tier.BATCH})
    for _, name in zip(range(LOOK_AHEAD_TASKS), waiting, strict=False):
        urgent = tasks[name]
        if urgent.header.tier is Tier.BATCH or now_ms - urgent.since_ms < DISPLACE_AFTER_MS:
            continue
        near = [each for each in groups if not foreign_to(each, groups, urgent)]
        if any(tasks.loads.has_room(each, urgent) for each in near):
            continue
        found = [_in_group(tasks, each, urgent) for each in near if each.could_hold(urgent)]
        possible = [each for each in found if each]
        if possible:
            return min(possible, key=_tokens)
    return []


def _in_group(tasks: TaskTable, group: OpenGroup, urgent: Task) -> list[Task]:
    """Return the fewest batch tasks of a group without which it has room; empty if there are none.

    They are the newest, as these have the least to compute again.
    """
    loads, tokens = tasks.loads, 0
    held = [tasks[name] for name in loads.of(group.leader)]
    batch = [each for each in held if each.header.tier is Tier.BATCH]
    batch.sort(key=lambda each: each.arrival, reverse=True)
    for count, each in enumerate(batch, 1):
        tokens += each.context_tokens
        if loads.has_room(group, urgent, without_tasks=count, without_tokens=tokens):
            return batch[:count]
    return []


def _tokens(found: Iterable[Task]) -> int:
    return sum(each.context_tokens for each in found)

"""Which batch tasks make room for an urgent one, where no group has any. Pure.

Batch tasks fill all KV that there is, and hold it for as long as they decode. An urgent task that
found no room for `DISPLACE_AFTER_MS` takes it from the newest of them, in the group in which the
fewest tokens have to be computed again. So does one that a group has taken, and into whose KV the
others have grown since. They go back to the queue, and continue after the tokens that they have;
blocks that nobody needed meanwhile, and host pages, are not computed again. The task pool calls
this module.
"""

from collections.abc import Callable, Iterable, Sequence

from coordinator.protocol.terms import Tier
from coordinator.tasks.placement import OpenGroup, foreign_to
from coordinator.tasks.task import Task
from coordinator.tasks.task_table import TaskTable

DISPLACE_AFTER_MS = 100
"""Room often comes by itself sooner than that, as tasks end."""

LOOK_EVERY_MS = 50
"""Least time between two looks: each goes through the tasks of the groups."""

DISPLACED_FOR_MAX = 16
"""Urgent tasks, and groups that have outgrown their KV, that get room by one look."""

LOOK_AHEAD_TASKS = 8
"""Urgent tasks without room that are passed over."""


def displaced(tasks: TaskTable, groups: Sequence[OpenGroup], now_ms: int) -> list[Task]:
    """Return the batch tasks that make room for one urgent task, or in one group, or none.

    Tasks that were placed for their age make no room, and one that has made room does so last.
    """
    for group in groups:
        if group.urgent_waiting and (outgrown := _of_outgrown(tasks, group, now_ms)):
            return outgrown
    passed, open_groups = 0, list(groups)
    for urgent in map(tasks.__getitem__, tasks.queue.in_order(now_ms, {Tier.BATCH})):
        if urgent.header.tier is Tier.BATCH or not any(each.reaches(urgent) for each in groups):
            continue
        near = [each for each in open_groups if not foreign_to(each, groups, urgent)]
        if any(tasks.loads.has_room(each, urgent) for each in near):
            continue
        able = [each for each in near if each.could_hold(urgent)]
        is_late = now_ms - urgent.since_ms >= DISPLACE_AFTER_MS
        found = [_in_group(tasks, each, urgent) for each in able] if is_late else []
        if possible := [each for each in found if each]:
            return min(possible, key=_tokens)
        # It claims the next room of this group, so no other task would get that.
        claimed = tasks.loads.best_for(urgent, able)
        open_groups = [each for each in open_groups if each is not claimed]
        passed += 1
        if passed == LOOK_AHEAD_TASKS or not open_groups:
            break
    return []


def _of_outgrown(tasks: TaskTable, group: OpenGroup, now_ms: int) -> list[Task]:
    """Return the fewest batch tasks without which a group's tasks fit; all of them if none do.

    Which of its tasks wait only the group knows, so the first of them may have come just now.
    """
    loads = tasks.loads
    if not loads.outgrow(group):
        return []
    held = [tasks[name] for name in loads.of(group.leader)]
    urgent = [each for each in held if each.header.tier is not Tier.BATCH]
    if all(now_ms - each.since_ms < DISPLACE_AFTER_MS for each in urgent):
        return []

    def fits(count: int, tokens: int) -> bool:
        return not loads.outgrow(group, count, tokens)

    return _fewest(tasks, group, fits) or _batch_of(tasks, group)


def _in_group(tasks: TaskTable, group: OpenGroup, urgent: Task) -> list[Task]:
    """Return the fewest batch tasks of a group without which it has room; empty if none do."""
    has_room = tasks.loads.has_room
    return _fewest(tasks, group, lambda count, tokens: has_room(group, urgent, count, tokens))


def _fewest(tasks: TaskTable, group: OpenGroup, suffices: Callable[[int, int], bool]) -> list[Task]:
    """Return as many of a group's batch tasks as suffice, by number and tokens; empty if none do.

    They are the newest, as these have the least to compute again.
    """
    batch, tokens = _batch_of(tasks, group), 0
    for count, each in enumerate(batch, 1):
        tokens += each.context_tokens
        if suffices(count, tokens):
            return batch[:count]
    return []


def _batch_of(tasks: TaskTable, group: OpenGroup) -> list[Task]:
    """Return the batch tasks of a group that may make room, in the order in which they do."""
    held = [tasks[name] for name in tasks.loads.of(group.leader)]
    batch = [each for each in held if each.header.tier is Tier.BATCH and not each.is_promoted]
    return sorted(batch, key=lambda each: (each.displacements, -each.arrival))


def _tokens(found: Iterable[Task]) -> int:
    return sum(each.context_tokens for each in found)

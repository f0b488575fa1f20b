"""The queued tasks and their order: by tier, then fair between tenants. Pure.

Each tenant has a line per tier, in order of arrival. Start-time fair queueing over tokens serves
the lines: a tenant that floods its tier delays itself, not the others. More urgent tiers go first,
but one placement in `PLACEMENTS_PER_PROMOTION` may go to a task that has waited at least
`ageing_ms`, so the lowest tier keeps a share of a busy cell. The task table calls this module; see
ADR 0020.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from typing import NamedTuple

from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.task import Task

PLACEMENTS_PER_PROMOTION = 8
"""While more urgent tasks wait, at most one placement in this many goes to an aged task."""

GENERATED_TOKENS_COUNTED_MAX = 1_024
"""Most generated tokens charged to a task's tenant: many clients set no limit."""


IDLE_LINES_MAX = 1_024
"""Tenants of a tier whose share is remembered while they have nothing queued."""


class _Entry(NamedTuple):
    """A queued task in its line."""

    arrival: int
    arrived_ms: int
    task: TaskId
    cost_tokens: int


class _Line:
    """One tenant's queued tasks in a tier, and the tokens charged to it there."""

    __slots__ = ("entries", "served_tokens")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.served_tokens = 0


class TaskQueue:
    """The queued tasks, by tier and tenant.

    Adding and removing cost a binary search and a shift of the list; taking the next task costs
    O(tenants).
    """

    __slots__ = ("_clocks", "_counts", "_lines", "_placed_since_promotion", "ageing_ms")

    def __init__(self, ageing_ms: int) -> None:
        self.ageing_ms = ageing_ms
        """May change while tasks wait."""
        self._lines: dict[Tier, dict[str, _Line]] = {tier: {} for tier in Tier}
        self._clocks: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Virtual time: tokens charged to the least served tenant at the last placement."""
        self._counts: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._placed_since_promotion = PLACEMENTS_PER_PROMOTION

    def __len__(self) -> int:
        """Return the number of queued tasks."""
        return sum(self._counts.values())

    def count(self, tier: Tier) -> int:
        """Return the number of queued tasks of a tier."""
        return self._counts[tier]

    def count_of(self, tier: Tier, tenant: str) -> int:
        """Return the number of queued tasks of a tenant in a tier."""
        line = self._lines[tier].get(tenant)
        return len(line.entries) if line else 0

    def longest(self, tier: Tier) -> str | None:
        """Return the tenant with the most queued tasks of a tier."""
        lines = self._lines[tier]
        return max(lines, key=lambda name: len(lines[name].entries), default=None)

    def newest_first(self, tier: Tier, tenant: str) -> Iterator[TaskId]:
        """Yield a tenant's queued tasks of a tier, newest first."""
        line = self._lines[tier].get(tenant)
        return (entry.task for entry in reversed(line.entries if line else ()))

    def put(self, task: Task) -> None:
        """Queue a task in order of arrival."""
        lines, tenant = self._lines[task.header.tier], task.header.tenant
        line = lines.setdefault(tenant, _Line())
        if not line.entries:
            # A tenant cannot save up a share that it did not use.
            line.served_tokens = max(line.served_tokens, self._clocks[task.header.tier])
        insort(line.entries, _entry(task))
        self._counts[task.header.tier] += 1

    def remove(self, task: Task) -> None:
        """Remove a queued task."""
        tier = task.header.tier
        line = self._lines[tier][task.header.tenant]
        entry = _entry(task)
        index = bisect_left(line.entries, entry)
        assert line.entries[index : index + 1] == [entry], f"task {task.id} is not queued."
        del line.entries[index]
        self._counts[tier] -= 1
        if not self._counts[tier]:
            # No task waits, so no tenant is owed anything.
            self._lines[tier].clear()
        elif len(self._lines[tier]) > IDLE_LINES_MAX:
            self._forget_idle(tier)

    def placed(self, task: Task, now_ms: int) -> None:
        """Charge a task that is about to be placed to its tenant, once per task."""
        tier = task.header.tier
        urgent = any(self.count(other) for other in Tier if other < tier)
        is_promoted = urgent and now_ms - task.arrived_ms >= self.ageing_ms
        task.is_promoted |= is_promoted
        self._placed_since_promotion = 0 if is_promoted else self._placed_since_promotion + 1
        if task.is_charged:
            return
        task.is_charged = True
        line = self._lines[tier][task.header.tenant]
        self._clocks[tier] = max(self._clocks[tier], line.served_tokens)
        line.served_tokens += _entry(task).cost_tokens

    def overdue(self, tier: Tier, arrived_before_ms: int) -> list[TaskId]:
        """Return the tier's tasks that arrived before a time, oldest first within a tenant."""
        found = []
        for line in self._lines[tier].values():
            for entry in line.entries:
                if entry.arrived_ms >= arrived_before_ms:
                    break
                found.append(entry.task)
        return found

    def in_order(self, now_ms: int, closed: Collection[Tier]) -> Iterator[TaskId]:
        """Yield the tasks in placement order; the queue must not change meanwhile.

        The caller may add a tier to `closed` on the way, which ends that tier early.
        """
        promoted = self._promoted(now_ms)
        if promoted is not None:
            yield promoted
        for tier in Tier:
            lines = [_fair(line) for line in self._lines[tier].values() if line.entries]
            for _, _, task in heapq.merge(*lines):
                if tier in closed:
                    break
                if task != promoted:
                    yield task

    def _promoted(self, now_ms: int) -> TaskId | None:
        """Return the aged task whose turn it is, or None."""
        if self._placed_since_promotion < PLACEMENTS_PER_PROMOTION:
            return None
        heads = [
            (tier, line.entries[0])
            for tier in Tier
            for line in self._lines[tier].values()
            if line.entries
        ]
        if not heads:
            return None
        lifted = [(self._lift(tier, head, now_ms), head.arrival, head.task) for tier, head in heads]
        # The most urgent tier's first task needs no promotion; fair order serves it.
        first = min(lifted)
        most_urgent = min(tier for tier, _ in heads)
        is_aged = all(head.task != first[2] or tier > most_urgent for tier, head in heads)
        return first[2] if is_aged else None

    def _lift(self, tier: Tier, entry: _Entry, now_ms: int) -> int:
        return max(tier - (now_ms - entry.arrived_ms) // self.ageing_ms, Tier.INTERACTIVE)

    def _forget_idle(self, tier: Tier) -> None:
        lines = self._lines[tier]
        for name in [name for name, line in lines.items() if not line.entries]:
            del lines[name]


def _fair(line: _Line) -> Iterator[tuple[int, int, TaskId]]:
    served = line.served_tokens
    for entry in line.entries:
        yield served, entry.arrival, entry.task
        served += entry.cost_tokens


def _entry(task: Task) -> _Entry:
    header = task.header
    cost = header.prompt_tokens + min(header.max_tokens, GENERATED_TOKENS_COUNTED_MAX)
    return _Entry(task.arrival, task.arrived_ms, task.id, max(cost, 1))

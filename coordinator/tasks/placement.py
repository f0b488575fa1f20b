"""Which group takes which task: room, choice, and what can ever fit.

A group has room for a task while it holds fewer than `max_tasks` tasks and has blocks left for the
task's tokens so far. Later growth its scheduler handles by preemption, and where that hits urgent
tasks, batch tasks make room (`displacement.py`). The group with the fewest tokens per rank is
chosen, the lowest leader at a tie; prompt tokens that a group has read before count in its favour.
A round goes through the queue in order. A task without room claims the least loaded group that
could hold it, so later tasks do not take the room it waits for; `LOOK_AHEAD_TASKS` such tasks close
their tier for the round.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from comm_pool.layout import Rank
from comm_pool.mixed import Staged
from coordinator.protocol.terms import Binding, TaskId, Tier
from coordinator.ranks.roster import Roster, kv_tokens
from coordinator.switching.stragglers import Stragglers
from coordinator.switching.switcher import Switcher
from coordinator.tasks.prefix_affinity import PrefixAffinity
from coordinator.tasks.task import Task
from coordinator.tasks.task_queue import TaskQueue

LOOK_AHEAD_TASKS = 32
"""Tasks without room to pass over, per tier and round."""

KNOWN_TOKEN_WORTH = 4
"""Context tokens, read by every step, that weigh as much as one prompt token read before.

Low on purpose: reading a token costs tens of times what it costs to hold it for a step, but tasks
that end late wait for each other, and a prompt that many share is soon known to all groups."""

BATCH_RESERVE_DIVISOR = 8
"""1/8 of a group's places is closed to batch tasks, for the more urgent tasks that come next."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that serves now and whose tasks survive the switch in progress."""

    binding: Binding
    max_tasks: int
    blocks_total: int
    block_tokens: int

    reserved_tiers: int = 0
    """Number of the most urgent tiers that it is reserved for; 0 takes every task."""

    cut_off: frozenset[str] = frozenset()
    """Addresses of gateways that its leader cannot push tokens to now."""

    urgent_waiting: int = 0
    """Its interactive and standard tasks that hold no KV, by its leader's newest report; 0 in one
    that a switch changes: early copies take its free pages."""

    @property
    def leader(self) -> Rank:
        """The rank to which tasks are sent."""
        return self.binding.group.leader

    def slots(self, tier: Tier) -> int:
        """Return how many tasks it may hold, counting one of this tier that is to be added."""
        reserved = self.max_tasks // BATCH_RESERVE_DIVISOR if tier is Tier.BATCH else 0
        return self.max_tasks - reserved

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    @property
    def context_tokens_max(self) -> int:
        """The longest context that fits alone."""
        return self.blocks_total * self.block_tokens

    def reaches(self, task: Task) -> bool:
        """Return whether its leader can push the task's tokens to the gateway."""
        return task.header.reply_to not in self.cut_off

    def could_hold(self, task: Task) -> bool:
        """Return whether the task can run here: it fits alone, at its greatest length."""
        return self.reaches(task) and task.context_tokens_max <= self.context_tokens_max


def open_groups(
    switcher: Switcher,
    roster: Roster,
    stragglers: Stragglers,
    reserved_groups: Mapping[Rank, int] | None = None,
) -> tuple[OpenGroup, ...]:
    """Return the groups to place into: granted, in the target, and serving by leaders' reports.

    `reserved_groups`: leader -> number of the most urgent tiers that its group takes. While a
    switch waits for stragglers, groups that are to change and have none are open too; all of them
    are while KV is copied early.
    """
    if switcher.recovering:
        return ()
    bindings = [each for each in switcher.target.bindings if switcher.is_granted(each)]
    if switcher.is_speculating:
        changing = changing_groups(switcher, roster)
        bindings += [each for each in changing if stragglers.is_idle(each.group.leader)]
    if switcher.is_precopying:
        bindings += changing_groups(switcher, roster)
    groups = []
    for binding in bindings:
        if not roster.serves(binding.group):
            continue
        record = roster[binding.group.leader]
        report = record.report
        if report is not None and report.binding == binding and report.blocks_total > 0:
            hello = record.hello
            group = OpenGroup(
                binding,
                hello.max_tasks,
                report.blocks_total,
                hello.tokens_per_slot,
                reserved_groups.get(binding.group.leader, 0) if reserved_groups else 0,
                frozenset(link.reply_to for link in report.links if link.is_open),
                report.urgent_waiting if binding in switcher.target.bindings else 0,
            )
            groups.append(group)
    return tuple(groups)


def with_gains(groups: Iterable[OpenGroup], switcher: Switcher) -> list[OpenGroup]:
    """Return the groups that would hold more if they were formed anew, as they would be then."""
    gains = [(group, switcher.blocks_to_gain(group.binding)) for group in groups]
    return [replace(group, blocks_total=group.blocks_total + gain) for group, gain in gains if gain]


def changing_groups(switcher: Switcher, roster: Roster) -> list[Binding]:
    """Return the groups that are bound, by their leaders' reports, but not in the target."""
    reports = [report for rank in switcher.alive if (report := roster.report_of(rank))]
    return [
        report.binding
        for report in reports
        if report.binding is not None
        and report.binding.group.leader == report.rank
        and report.binding not in switcher.target.bindings
    ]


def drains(leader: Rank, switcher: Switcher, roster: Roster, *, was_waited_for: bool) -> bool:
    """Return whether a switch waited for a task of this leader to finish."""
    if switcher.is_speculating:
        return was_waited_for
    if not switcher.is_draining:
        return False
    return leader in {each.group.leader for each in changing_groups(switcher, roster)}


def max_context_tokens(roster: Roster, alive: Collection[Rank]) -> int:
    """Return the longest context of any group that the ranks could form."""
    longest = 0
    for rank in alive:
        width = 1
        while rank % width == 0 and rank + width <= roster.world:
            longest = max(longest, _context_of(rank, width, roster, alive))
            width *= 2
    return longest


def _context_of(leader: Rank, width: int, roster: Roster, alive: Collection[Rank]) -> int:
    ranks = [Rank(rank) for rank in range(leader, leader + width)]
    if any(rank not in alive or not roster.supports(rank, width) for rank in ranks):
        return 0
    hellos = [roster[rank].hello for rank in ranks]
    tokens = max(kv_tokens(hellos, width, stages) for stages in _stages_of(ranks, roster))
    return min(tokens, *(hello.max_model_len_tokens for hello in hellos))


def _stages_of(ranks: Sequence[Rank], roster: Roster) -> Iterator[int]:
    """Yield into how many pipeline stages these ranks can divide the layers of a group."""
    width, stages = len(ranks), 1
    while stages <= width:
        staged = Staged(stages, width // stages) if stages > 1 else None
        if staged is None or all(roster.can_compute(rank, width, staged) for rank in ranks):
            yield stages
        stages *= 2


def foreign_to(group: OpenGroup, groups: Sequence[OpenGroup], task: Task) -> bool:
    """Return whether a group is reserved for more urgent tiers, and the task fits elsewhere."""
    if not task.header.tier >= group.reserved_tiers > 0:
        return False
    return any(
        each.could_hold(task) for each in groups if not task.header.tier >= each.reserved_tiers > 0
    )


def _for_tier(
    free: Sequence[OpenGroup], groups: Sequence[OpenGroup], task: Task
) -> Sequence[OpenGroup]:
    """Return those of the `free` groups that may take the task.

    A task that fits nowhere else may go to a group reserved for more urgent tiers.
    """
    return [each for each in free if not foreign_to(each, groups, task)]


class Loads:
    """The context tokens of the tasks that each leader runs, without paused ones."""

    __slots__ = ("_tasks", "_tokens", "homes")

    def __init__(self) -> None:
        self.homes = PrefixAffinity()
        self._tasks: dict[Rank, dict[TaskId, int]] = {}
        self._tokens: dict[Rank, int] = {}

    def count(self, leader: Rank, task: TaskId, tokens: int) -> None:
        """Count a task, or update its tokens."""
        tasks = self._tasks.setdefault(leader, {})
        self._tokens[leader] = self._tokens.get(leader, 0) + tokens - tasks.get(task, 0)
        tasks[task] = tokens

    def remove(self, leader: Rank, task: TaskId) -> None:
        """Stop counting a task, if it is counted."""
        tokens = self._tasks.get(leader, {}).pop(task, None)
        if tokens is not None:
            self._tokens[leader] -= tokens

    def tasks(self, leader: Rank) -> int:
        """Return how many tasks the leader runs."""
        return len(self._tasks.get(leader, ()))

    def of(self, leader: Rank) -> tuple[TaskId, ...]:
        """Return the tasks that the leader runs."""
        return tuple(self._tasks.get(leader, ()))

    def counted(self) -> set[tuple[Rank, TaskId]]:
        """Return every counted task with its leader."""
        return {(leader, task) for leader, tasks in self._tasks.items() for task in tasks}

    def tokens(self, leader: Rank) -> int:
        """Return the context tokens that the leader's tasks hold."""
        return self._tokens.get(leader, 0)

    def has_room(
        self, group: OpenGroup, task: Task, without_tasks: int = 0, without_tokens: int = 0
    ) -> bool:
        """Return whether the group can take the task now, or could without some of its tasks."""
        tasks = self.tasks(group.leader) - without_tasks
        if tasks >= group.slots(task.header.tier) or not group.could_hold(task):
            return False
        used = self._blocks_used(group, without_tasks, without_tokens)
        return tasks == 0 or used + group.blocks(task.context_tokens) <= group.blocks_total

    def outgrow(self, group: OpenGroup, without_tasks: int = 0, without_tokens: int = 0) -> bool:
        """Return whether a group's tasks have grown beyond its KV, or would without some of them.

        Tasks that share blocks may fit even so. `has_room` counts no block for what the new task
        wastes, so a group that was filled exactly has not outgrown its KV.
        """
        return self._blocks_used(group, without_tasks, without_tokens) > group.blocks_total + 1

    def _blocks_used(self, group: OpenGroup, without_tasks: int, without_tokens: int) -> int:
        # A task wastes half a block on average; counting a whole one is safe.
        tokens, tasks = self.tokens(group.leader), self.tasks(group.leader)
        return group.blocks(tokens - without_tokens) + tasks - without_tasks

    def choose(
        self,
        groups: Iterable[OpenGroup],
        queue: TaskQueue,
        task_of: Callable[[TaskId], Task],
        now_ms: int,
        held_tiers: Collection[Tier] = (),
    ) -> list[tuple[Task, OpenGroup]]:
        """Go through the queue once; the chosen tasks are counted, but still queued.

        Of `held_tiers` only tasks that have begun are placed.
        """
        groups = tuple(groups)
        free = [group for group in groups if self.tasks(group.leader) < group.max_tasks]
        closed: set[Tier] = set()
        blocked: Counter[Tier] = Counter()
        chosen: list[tuple[Task, OpenGroup]] = []
        for task in map(task_of, queue.in_order(now_ms, closed)) if free else ():
            if task.header.tier in held_tiers and not task.generated:
                closed.add(task.header.tier)  # Those that have begun are older.
                continue
            if not any(group.reaches(task) for group in groups):
                continue  # Others of its tier need not wait for the link to its gateway.
            groups_for = _for_tier(free, groups, task)
            group = self.best_for(task, [each for each in groups_for if self.has_room(each, task)])
            if group is not None:
                self.count(group.leader, task.id, task.context_tokens)
                self.homes.remember(group.binding, task.prefixes)
                chosen.append((task, group))
                continue
            claimed = self.best_for(task, [each for each in groups_for if each.could_hold(task)])
            free = [group for group in free if group is not claimed]
            blocked[task.header.tier] += 1
            if blocked[task.header.tier] >= LOOK_AHEAD_TASKS:
                closed.add(task.header.tier)
            if not free:
                break
        return chosen

    def best_for(self, task: Task, groups: Sequence[OpenGroup]) -> OpenGroup | None:
        """Return the least loaded group reserved for the task's tier, or else of the rest."""
        reserved = [group for group in groups if task.header.tier < group.reserved_tiers]
        return min(reserved or groups, key=lambda group: self._weight(group, task), default=None)

    def _weight(self, group: OpenGroup, task: Task) -> tuple[float, Rank]:
        known_tokens = self.homes.matched_tokens(group.binding, task.prefixes)
        tokens = self.tokens(group.leader) - KNOWN_TOKEN_WORTH * known_tokens
        return tokens / group.binding.group.width, group.leader

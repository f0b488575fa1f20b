"""Observes the unfinished tasks; `controller` and the simulator call this module."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.model.observation import TierObservation
from coordinator.model.policy_settings import TierGoal
from coordinator.policy.arrivals import Arrivals
from coordinator.policy.demand import OUTPUT_ASSUMED
from coordinator.protocol.terms import Tier
from coordinator.tasks.task import HELD, State, Task

REMAINDER_MIN_SHARE = 0.25
"""A task longer than the mean is expected to go on for this share of the mean."""


@dataclass(slots=True)
class _Count:
    unstarted: int = 0
    queued: int = 0
    unstarted_tokens: int = 0
    oldest_ms: int = 0
    running: int = 0
    context_tokens: int = 0
    to_come: float = 0.0
    longest: int = 0
    unstarted_late: int = 0
    running_late: int = 0


def observe_tiers(
    tasks: Iterable[Task], arrivals: Arrivals, goals: Mapping[Tier, TierGoal], now_ms: int
) -> tuple[tuple[TierObservation, ...], dict[int, list[int]]]:
    """Return every tier's tasks, and each leader's number of tasks by tier.

    Costs O(tasks).
    """
    counts = {tier: _Count() for tier in Tier}
    outputs = {tier: arrivals[tier].output_tokens or OUTPUT_ASSUMED for tier in Tier}
    by_leader: dict[int, list[int]] = {}
    for task in tasks:
        header = task.header
        count = counts[header.tier]
        if task.context_tokens_max > count.longest:
            count.longest = task.context_tokens_max
        if task.leader is not None:
            by_leader.setdefault(task.leader, [0] * len(Tier))[header.tier] += 1
        # A paused task may have no token, but no group can begin it.
        if (task.generated and task.state in HELD) or task.state is State.PAUSED:
            mean = outputs[header.tier]
            count.running += 1
            count.running_late += _is_late(task, goals[header.tier], now_ms)
            count.context_tokens += header.prompt_tokens + task.generated
            expected = max(mean - task.generated, REMAINDER_MIN_SHARE * mean)
            count.to_come += min(expected, header.max_tokens - task.generated)
            continue
        count.unstarted += 1
        count.unstarted_late += _is_late(task, goals[header.tier], now_ms)
        count.queued += task.state is State.QUEUED
        count.unstarted_tokens += header.prompt_tokens + task.generated
        if task.state is State.QUEUED or not task.generated:
            count.oldest_ms = max(count.oldest_ms, now_ms - task.arrived_ms)
    return tuple(_observe_tier(tier, counts[tier], arrivals, now_ms) for tier in Tier), by_leader


def _is_late(task: Task, goal: TierGoal, now_ms: int) -> bool:
    """Return whether the task has missed its goal for the first token."""
    if goal.ttft_s is None:
        return False
    first_ms = now_ms if task.first_ms is None else task.first_ms
    return first_ms - task.arrived_ms > goal.ttft_s * 1000


def _observe_tier(tier: Tier, count: _Count, arrivals: Arrivals, now_ms: int) -> TierObservation:
    known = arrivals[tier]
    rate = known.rate(now_ms)
    return TierObservation(
        tier=int(tier),
        unstarted=count.unstarted,
        queued=count.queued,
        unstarted_tokens=count.unstarted_tokens,
        oldest_wait_ms=count.oldest_ms,
        running=count.running,
        context_tokens=count.context_tokens,
        to_come_tokens=round(max(0.0, count.to_come), 1),
        longest_tokens=count.longest,
        rate=round(rate.per_s, 3),
        rate_age_s=round(rate.age_s, 2),
        prompts=known.prompts(now_ms, rate),
        unstarted_late=count.unstarted_late,
        running_late=count.running_late,
        output_tokens=round(known.output_tokens, 1),
    )

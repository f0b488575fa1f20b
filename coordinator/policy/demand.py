"""The demand to serve over the horizon, from an observation; `decide` calls this module."""

from collections.abc import Iterable, Sequence

from comm_pool.layout import Group, Layout, Rank
from coordinator.model.observation import GroupObservation, Observation, TierObservation
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.predict import Demand
from coordinator.protocol.terms import Tier

SHORT_WINDOW_S = 2.0
LONG_WINDOW_S = 15.0

DEVIATIONS = 3.0
"""The short window counts if it differs from the long one by this many standard deviations."""

PROMPTS_ASSUMED = (512,)
OUTPUT_ASSUMED = 128.0
"""For tiers without any arrival so far."""

IDLE_RATE = 0.05
"""An idle cell is laid out for single requests, one in 20 seconds."""


def expected_rate(short: float, long: float) -> float:
    """Return the arrivals per second to plan for.

    Few arrivals say little: the long window counts, unless chance cannot explain the short one. A
    falling rate counts by half, for the next burst.
    """
    deviation = (max(long, 1 / LONG_WINDOW_S) / (2 * SHORT_WINDOW_S)) ** 0.5
    if short > long + DEVIATIONS * deviation:
        return short
    if short < long - DEVIATIONS * deviation:
        return (short + long) / 2
    return long


def demands_of(observation: Observation, settings: PolicySettings) -> list[Demand]:
    """Return the demand of each tier that has any; for an idle cell, one standard request's."""
    found = [
        _demand(tier, settings)
        for tier in observation.tiers
        if tier.unstarted or tier.running or max(tier.rate_short, tier.rate_long) > IDLE_RATE
    ]
    if found:
        return found
    known = next((tier for tier in observation.tiers if tier.prompts), None)
    prompts = known.prompts if known else PROMPTS_ASSUMED
    output = known.output_tokens if known else OUTPUT_ASSUMED
    goal = settings.goals[Tier.STANDARD]
    return [Demand(Tier.STANDARD, goal, IDLE_RATE, prompts, output or OUTPUT_ASSUMED)]


def _demand(tier: TierObservation, settings: PolicySettings) -> Demand:
    return Demand(
        tier=tier.tier,
        goal=settings.goals[Tier(tier.tier)],
        rate=expected_rate(tier.rate_short, tier.rate_long),
        prompts=tier.prompts or PROMPTS_ASSUMED,
        output=tier.output_tokens or OUTPUT_ASSUMED,
        unstarted=tier.unstarted,
        unstarted_tokens=tier.unstarted_tokens,
        running=tier.running,
        context=tier.context_tokens,
        to_come=tier.to_come_tokens,
    )


def foreign_share(
    groups: Iterable[Group], observations: Sequence[GroupObservation], current: Layout, tier: int
) -> float:
    """Return the share of a tier's tasks that the ranks of these groups run now."""
    ranks = {rank for group in groups for rank in group.ranks}
    here = total = 0.0
    members: dict[Rank, Group] = {group.leader: group for group in current.groups}
    for each in observations:
        count = each.tasks[tier] if tier < len(each.tasks) else 0
        group = members.get(Rank(each.leader))
        if not count or group is None:
            continue
        total += count
        here += count * len(ranks.intersection(group.ranks)) / group.width
    return here / total if total else 0.0

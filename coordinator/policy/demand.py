"""The demand to serve over the horizon, from an observation; `decide` calls this module."""

from collections.abc import Iterable, Sequence

from comm_pool.layout import Layout, Rank
from coordinator.model.observation import GroupObservation, Observation, TierObservation
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.predict import Demand
from coordinator.protocol.terms import Tier

PROMPTS_ASSUMED = (512,)
OUTPUT_ASSUMED = 128.0
"""For tiers without any arrival so far."""

IDLE_RATE = 0.05
"""An idle cell is laid out for single requests, one in 20 seconds."""


def demands_of(observation: Observation, settings: PolicySettings) -> list[Demand]:
    """Return the demand of each tier that has any; for an idle cell, one standard request's."""
    found = [
        _demand(tier, settings)
        for tier in observation.tiers
        if tier.unstarted or tier.running or tier.rate > IDLE_RATE
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
        rate=tier.rate,
        prompts=tier.prompts or PROMPTS_ASSUMED,
        output=tier.output_tokens or OUTPUT_ASSUMED,
        unstarted=tier.unstarted,
        unstarted_tokens=tier.unstarted_tokens,
        running=tier.running,
        context=tier.context_tokens,
        to_come=tier.to_come_tokens,
        age_s=tier.rate_age_s,
        unstarted_late=tier.unstarted_late,
        running_late=tier.running_late,
    )


def foreign_share(
    ranks: Iterable[Rank], observations: Sequence[GroupObservation], current: Layout, tier: int
) -> float:
    """Return the share of a tier's tasks that these ranks run now."""
    by_rank = tasks_by_rank(observations, current, tier)
    total = sum(by_rank.values())
    here = sum(by_rank.get(rank, 0.0) for rank in ranks)
    return here / total if total else 0.0


def tasks_by_rank(
    observations: Sequence[GroupObservation], current: Layout, tier: int
) -> dict[Rank, float]:
    """Return the number of a tier's tasks on each rank; members of a group share its tasks."""
    leaders = {Rank(each.leader): each for each in observations}
    found = {}
    for group in current.groups:
        record = leaders.get(group.leader)
        count = record.tasks[tier] if record is not None and tier < len(record.tasks) else 0
        found.update(dict.fromkeys(group.ranks, count / group.width))
    return found

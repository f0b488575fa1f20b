"""The policy's forecast for the serving layout, in numbers that can be compared later. Pure.

Each decision predicts all candidates; this is the part about the layout that stays. It also exists
when nothing was decided because an operator chose: a wrong prediction reveals wrong step times in
either case.
"""

from collections.abc import Iterable

from comm_pool.layout import Layout
from coordinator.model.cost_model import CostModel
from coordinator.model.events import Expected
from coordinator.model.observation import Observation
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.decide import Verdict, standing
from coordinator.policy.demand import demands_of
from coordinator.policy.predict import TierForecast
from coordinator.policy.score import Score, score
from coordinator.protocol.terms import Tier


def forecast_of(
    observation: Observation,
    current: Layout,
    verdict: Verdict,
    costs: CostModel,
    settings: PolicySettings,
) -> tuple[Expected, ...]:
    """Return what each tier with tasks can expect if `current`, the observed layout, stays."""
    if observation.is_switching:
        return ()
    here = standing(observation, current)
    candidate = next((each for each in verdict.candidates if each.arrangement == here), None)
    found: Score | None = candidate.score if candidate is not None else None
    if found is None:
        found = score(
            here, observation, demands_of(observation, settings), costs, settings, current
        )
    return _by_tier(found.tiers)


def _by_tier(forecasts: Iterable[TierForecast]) -> tuple[Expected, ...]:
    """Average the forecasts of several kinds of groups for a tier, weighted by requests."""
    parts: dict[int, list[TierForecast]] = {}
    for each in forecasts:
        if each.asked > 0:
            parts.setdefault(each.tier, []).append(each)
    expected = []
    for tier, of_tier in parts.items():
        asked = sum(each.asked for each in of_tier)
        expected.append(
            Expected(
                tier=Tier(tier).name.lower(),
                ttft_s=sum(each.ttft_s * each.asked for each in of_tier) / asked,
                tpot_s=sum(each.tpot_s * each.asked for each in of_tier) / asked,
                attainment=sum(each.good for each in of_tier) / asked,
            )
        )
    return tuple(expected)

"""How good an arrangement is for a demand; `decide` calls this module.

Requests per second that meet their tiers' goals count first. Speed decides among arrangements that
meet the goals as well: latency relative to the goals, or the groups' use if a tier has none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from comm_pool.layout import Group, Layout, Mode, Rank
from coordinator.model.cost_model import CostModel
from coordinator.model.observation import Observation
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.candidates import Arrangement
from coordinator.policy.demand import foreign_share
from coordinator.policy.predict import Demand, TierForecast, forecast
from coordinator.protocol.terms import Tier


@dataclass(frozen=True, slots=True)
class Score:
    """`goodput` of `asked`, in weighted requests per second; `refused` is why it is impossible."""

    goodput: float
    worth: float
    asked: float
    cost: float
    tiers: tuple[TierForecast, ...] = ()
    refused: str = ""

    @property
    def undecided(self) -> float:
        """The part of `asked` that may still meet its goals."""
        return self.asked - sum(each.late for each in self.tiers)

    @property
    def attainment(self) -> float:
        """The share of requests that meet their goals."""
        return self.goodput / self.asked if self.asked else 1.0

    @property
    def use(self) -> float:
        """The share of its capacity that arrivals need; above 1 the queue grows.

        If there are several kinds of groups, that of the busiest.
        """
        return max((each.use for each in self.tiers), default=0.0)


def score(
    arrangement: Arrangement,
    observation: Observation,
    demands: Sequence[Demand],
    costs: CostModel,
    settings: PolicySettings,
    current: Layout,
) -> Score:
    """Predict what the arrangement makes of the demands."""
    if reason := _refuse(arrangement, observation, costs, settings):
        return Score(0.0, 0.0, 1.0, 0.0, refused=reason)
    horizon_s = settings.horizon_ms / 1000
    reserved = [g for g in arrangement.layout.groups if g.leader in arrangement.reserved]
    others = [g for g in arrangement.layout.groups if g.leader not in arrangement.reserved]
    forecasts: list[TierForecast] = []
    if reserved:
        # Tasks stay out of the groups that are meant for them if no switch can move them there.
        urgent = [each for each in demands if each.tier < arrangement.tiers]
        rest = [each for each in demands if each.tier >= arrangement.tiers]
        beyond = _out_of_reach(reserved, current)
        parts = [foreign_share(beyond, observation.groups, current, each.tier) for each in urgent]
        away = [each.under_way(part) for each, part in zip(urgent, parts, strict=True) if part]
        urgent = [each.without_running(part) for each, part in zip(urgent, parts, strict=True)]
        beyond = _out_of_reach(others, current)
        parts = [foreign_share(beyond, observation.groups, current, each.tier) for each in rest]
        stay = [each.under_way(part) for each, part in zip(rest, parts, strict=True)]
        gone = [each.without_running(part) for each, part in zip(rest, parts, strict=True)]
        forecasts += _pool(reserved, [*urgent, *stay], costs, horizon_s)
        forecasts += _pool(others, [*away, *gone], costs, horizon_s)
    else:
        forecasts += _pool(others, demands, costs, horizon_s)
    if reason := _refuse_pipeline(arrangement, demands, forecasts):
        return Score(0.0, 0.0, 1.0, 0.0, refused=reason)
    asked = sum(each.asked for each in forecasts)
    return Score(
        goodput=sum(each.good for each in forecasts),
        worth=sum(each.worth for each in forecasts),
        asked=asked,
        cost=sum(each.cost * each.asked for each in forecasts) / asked if asked else 0.0,
        tiers=tuple(forecasts),
    )


def _out_of_reach(groups: Iterable[Group], current: Layout) -> set[Rank]:
    """Return the ranks of the current layout whose tasks cannot move to any of these new groups.

    A switch moves KV only among ranks that share a group before or after it. A group that stays
    gets no tasks of others.
    """
    old = {rank: group for group in current.groups for rank in group.ranks}
    reached: set[Rank] = set()
    for group in groups:
        before = old.get(group.leader, group)
        reached.update(before.ranks if before.width > group.width else group.ranks)
    return old.keys() - reached


def _pool(
    groups: Sequence[Group], demands: Sequence[Demand], costs: CostModel, horizon_s: float
) -> list[TierForecast]:
    """Return the forecasts of groups that share demands by their number of ranks."""
    ranks = sum(group.width for group in groups)
    found: list[TierForecast] = []
    for name, count in Counter(group.name for group in groups).items():
        cost = costs.groups[name]
        width = next(group.width for group in groups if group.name == name)
        share = count * width / ranks
        found += forecast(cost, count, [each.part(share) for each in demands], horizon_s)
    return found


def _refuse(
    arrangement: Arrangement, observation: Observation, costs: CostModel, settings: PolicySettings
) -> str:
    layout = arrangement.layout
    known = [costs.groups.get(group.name) for group in layout.groups]
    if any(cost is None for cost in known):
        return "its steps were not measured"
    longest = max((tier.longest_tokens for tier in observation.tiers), default=0)
    holds = max(cost.capacity_tokens for cost in known if cost is not None)
    if longest > holds:
        return f"no group holds {longest} tokens"
    for tier in observation.tiers:
        wanted = settings.goals[Tier(tier.tier)].width_min
        if (tier.unstarted or tier.running) and _narrowest(arrangement, tier.tier) < wanted:
            return f"{Tier(tier.tier).name.lower()} tasks ask for a group {wanted} wide"
    return ""


def _refuse_pipeline(
    arrangement: Arrangement, demands: Sequence[Demand], forecasts: Sequence[TierForecast]
) -> str:
    """Refuse pipeline groups in which interactive tasks miss their goal per token.

    A token passes all stages, so its time does not fall with the load as it does in tp.
    """
    if all(group.mode is not Mode.PP for group in arrangement.layout.groups):
        return ""
    goals = {each.tier: each.goal.tpot_s for each in demands}
    goal_s = goals.get(Tier.INTERACTIVE)
    slow = [each.tpot_s for each in forecasts if each.tier == Tier.INTERACTIVE and each.asked]
    if goal_s is None or max(slow, default=0.0) <= goal_s:
        return ""
    return (
        f"interactive tasks would get a token every {max(slow) * 1e3:.0f} ms from pipeline "
        f"stages, and their goal is {goal_s * 1e3:.0f} ms"
    )


def _narrowest(arrangement: Arrangement, tier: int) -> int:
    """Return the width of the narrowest group that may take tasks of a tier."""
    is_reserved = bool(arrangement.reserved) and tier < arrangement.tiers
    return min(
        group.width
        for group in arrangement.layout.groups
        if not arrangement.reserved or (group.leader in arrangement.reserved) == is_reserved
    )

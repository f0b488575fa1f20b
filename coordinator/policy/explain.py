"""A verdict's record: inputs, candidates and scores, rounded for people. Pure."""

from collections.abc import Mapping

from coordinator.model.records import Decision
from coordinator.policy.decide import POLICY, ScoredCandidate, Verdict
from coordinator.policy.predict import Demand
from coordinator.protocol.terms import Carry, Tier


def recorded(verdict: Verdict, carry: Carry, now_ms: int) -> Decision:
    """Return the record of a verdict."""
    return Decision(
        now_ms,
        verdict.choice.name,
        carry,
        verdict.reason,
        inputs=inputs_of(verdict.demands),
        candidates=tuple(_candidate(each) for each in verdict.candidates),
        cause=POLICY,
        changes=verdict.changes,
    )


def inputs_of(demands: tuple[Demand, ...]) -> Mapping[str, object]:
    """Return the demand of each tier."""
    return {Tier(each.tier).name.lower(): _demand(each) for each in demands}


def _demand(demand: Demand) -> Mapping[str, object]:
    return {
        "requests_per_s": round(demand.rate, 2),
        "prompt_tokens": round(demand.prompt),
        "output_tokens": round(demand.output),
        "waiting": round(demand.unstarted),
        "waiting_tokens": round(demand.unstarted_tokens),
        "running": round(demand.running),
        "context_tokens": round(demand.context),
    }


def _candidate(candidate: ScoredCandidate) -> Mapping[str, object]:
    score = candidate.score
    if score.refused:
        return {"layout": candidate.arrangement.name, "refused": score.refused}
    return {
        "layout": candidate.arrangement.name,
        "goals_met": round(score.attainment, 3),
        "worth": round(candidate.worth, 3),
        "cost": round(score.cost, 3),
        "use": round(score.use, 3),
        "tiers": {
            # If a layout has several kinds of groups, the slowest is shown.
            Tier(each.tier).name.lower(): {
                "ttft_ms": round(each.ttft_s * 1e3, 1),
                "tpot_ms": round(each.tpot_s * 1e3, 2),
            }
            for each in sorted(score.tiers, key=lambda each: each.ttft_s)
            if each.asked > 0
        },
    }

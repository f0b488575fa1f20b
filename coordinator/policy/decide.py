"""The decision: a pure function of an observation, with a reason in words.

It leaves an arrangement only for one that raises the predicted goodput by more than the switch
costs, or that meets the goals as well and has looked faster for a while. A layout has a minimum
stay, before which its predecessor never returns, and switches per minute are bounded. `controller`
calls this module on a clock; `aileron replay` and the simulator call it offline.
"""

import math
from dataclasses import dataclass, field, replace

from comm_pool.layout import Layout, Rank, diff, format_layout
from coordinator.model.cost_model import CostModel
from coordinator.model.observation import Observation
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.candidates import Arrangement, LayoutSpace, arrangements
from coordinator.policy.demand import IDLE_RATE, demands_of, tasks_by_rank
from coordinator.policy.predict import Demand
from coordinator.policy.score import Score, score
from coordinator.protocol.terms import Carry, Tier

POLICY = "policy"
"""Cause of a switch that the policy asked for."""

AS_GOOD = 0.99
"""Arrangements with this share of the best goodput meet the goals as well."""

STRESS = 2.0
"""A layout is also scored at a rate this many standard deviations higher."""

SHARE_MIN = 0.02
"""A gain of a smaller share of the requests not yet late is within what the forecast gets wrong."""

THROUGHPUT_GAIN_MIN = 0.1
"""Least relative gain where no tier has goals."""

AGE_MIN_S = 0.5
"""A rate observed for less time is taken to be as uncertain as after this time."""

URGENT_GAIN = 0.25
"""A relative gain above this waits only for a third of the minimum stay."""

RESERVED_WORTH = 0.94
"""Discount for reservations: reserved groups idle while others wait, and mean values hide that."""

STAY_ASSUMED_S = 20.0
"""Assumed stay of a layout chosen for speed alone, in which its switch must pay off."""

OVERLOAD_ATTAINMENT = 0.5
"""An arrangement is overloaded if a smaller share of the requests would meet their goals."""

OVERLOAD_LATE = 0.5
"""Once this share of the requests, those to come included, is late, an overload is left for
throughput alone."""

POTENTIAL_MARGIN = 0.05
"""Two arrangements can meet goals alike if these shares of a few requests differ by less."""

IN_QUESTION = 0.7
"""Only layouts with this share of the best worth are scored under a busier load too."""

MINUTE_MS = 60_000

REGRET_MS = 60_000
"""A change for speed was a mistake if requests begin to miss goals within this time."""

RETURN_MS = 20_000
"""A backlog lasts about this long: a return within it has to win by more."""

RETURN_WORTH = 0.8
"""Discount for a layout that was left so recently, if groups are reserved here and goals missed.

Tasks that run in groups which are not reserved for them are slow, and any new layout is predicted
to have fewer of those.
"""

CAUTION_TIMES_MAX = 10
"""Limit of the caution time, in multiples of its first value."""


@dataclass(frozen=True, slots=True)
class State:
    """The policy's memory between decisions: which arrangement has looked better, and since when.

    `faster_ms` is the time of its last change for speed alone. If goals called for another layout
    soon after that, it does not change for speed to a layout of at most `avoided_groups` groups
    until `careful_until_ms`, which is `caution_ms` later. `departures` has the layouts that it left
    in the last `RETURN_MS`, with the times.
    """

    preferred: str = ""
    since_ms: int = 0
    faster_ms: int | None = None
    caution_ms: int = 0
    careful_until_ms: int = 0
    avoided_groups: int = 0
    departures: tuple[tuple[Layout, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """An arrangement and its score.

    `worth` and `cost` include a busier load; `lost_s` is the time that its switch takes.
    """

    arrangement: Arrangement
    score: Score
    worth: float
    cost: float
    lost_s: float = 0.0

    def after_switch(self, horizon_ms: int) -> float:
        """Its worth over a horizon that begins with the switch."""
        return self.worth * max(0.0, 1 - self.lost_s * 1000 / horizon_ms)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The wanted arrangement and the reason; `changes` if it differs from the present one."""

    choice: Arrangement
    reason: str
    changes: bool
    candidates: tuple[ScoredCandidate, ...] = ()
    demands: tuple[Demand, ...] = field(default=())
    carry: Carry | None = None
    """How a switch carries running tasks; None is as ever."""


def decide(
    observation: Observation,
    current: Layout,
    space: LayoutSpace,
    costs: CostModel,
    settings: PolicySettings,
    state: State,
) -> tuple[Verdict, State]:
    """Return the verdict and what to remember; `current` is the layout of the observation."""
    here = standing(observation, current)
    if observation.is_switching:
        return Verdict(here, "a switch is under way", changes=False), state
    pinned = ""
    if observation.pinned_ms:
        seconds = -(-observation.pinned_ms // 1000)
        pinned = f"an operator chose this layout: the policy leaves it alone for {seconds} s more"
        state = replace(state, preferred="", since_ms=0)
    demands = demands_of(observation, settings)
    if unknown := [group.name for group in current.groups if group.name not in costs.groups]:
        reason = pinned or f"the steps of {unknown[0]} were not measured"
        return Verdict(here, reason, changes=False), state
    candidates = _score_all(observation, here, space, costs, settings, demands)
    now = next(each for each in candidates if each.arrangement == here)
    candidates = _discounted(candidates, now, state, observation.time_ms)
    if pinned:
        # Report the candidates anyway: the decision to add cells needs them.
        verdict = Verdict(here, pinned, changes=False)
        return replace(verdict, candidates=tuple(candidates), demands=tuple(demands)), state
    best = _best(candidates, now, settings)
    if _overloaded(now) and best.after_switch(settings.horizon_ms) <= _beaten_at(now, settings):

        def potential(each: ScoredCandidate) -> float:
            args = each.arrangement, observation, _quiet(demands), costs, settings, current
            return score(*args).attainment

        least = potential(now) - POTENTIAL_MARGIN
        best = _best([each for each in candidates if potential(each) >= least], now, settings)
    state = _remember(state, best, here, observation.time_ms)
    verdict, state = _choose(observation, now, best, settings, state)
    return replace(verdict, candidates=tuple(candidates), demands=tuple(demands)), state


def standing(observation: Observation, current: Layout) -> Arrangement:
    """Return the arrangement that was observed; `current` is its layout."""
    return Arrangement(current, tuple(_leaders(observation.reserved)), observation.reserved_tiers)


def _score_all(
    observation: Observation,
    here: Arrangement,
    space: LayoutSpace,
    costs: CostModel,
    settings: PolicySettings,
    demands: list[Demand],
) -> list[ScoredCandidate]:
    busier = [busier_than(demand, settings.horizon_ms / 1000) for demand in demands]
    tiers = {demand.tier for demand in demands}
    urgent = tasks_by_rank(observation.groups, here.layout, min(tiers))
    wanted = [here]
    for layout in space.layouts(here.layout, urgent):
        wanted += [each for each in arrangements(layout, tiers, urgent) if each != here]
    context = sum(demand.context for demand in demands)
    # Groups that change wait for the longest running step.
    first = score(here, observation, demands, costs, settings, here.layout)
    step_s = max((tier.tpot_s for tier in first.tiers), default=0.0)
    world = max(1, len(here.layout.ranks))
    scores = [score(each, observation, demands, costs, settings, here.layout) for each in wanted]
    top = max(found.worth for found in scores)
    candidates = []
    for each, found in zip(wanted, scores, strict=True):
        moved = len(diff(here.layout, each.layout)) / world
        lost_s = (costs.switch.seconds(context * moved) + step_s) * moved if moved else 0.0
        worth, cost = found.worth, found.cost
        if not found.refused and (worth >= top * IN_QUESTION or each == here):
            stressed = score(each, observation, busier, costs, settings, here.layout)
            worth = (worth + stressed.worth * found.asked / stressed.asked) / 2
            cost = (cost + stressed.cost) / 2
        if each.reserved:
            worth *= RESERVED_WORTH
        candidates.append(ScoredCandidate(each, found, worth, cost, lost_s))
    return candidates


def _discounted(
    candidates: list[ScoredCandidate], now: ScoredCandidate, state: State, now_ms: int
) -> list[ScoredCandidate]:
    """Return the candidates, with less worth if a layout was left a short while ago; see above."""
    here = now.arrangement
    if now.score.attainment >= AS_GOOD or not here.reserved:
        return candidates
    recent = {layout for layout, _ in _departures(state, now_ms)} - {here.layout}
    return [
        replace(each, worth=each.worth * RETURN_WORTH)
        if each.arrangement.layout in recent
        else each
        for each in candidates
    ]


def _departures(state: State, now_ms: int) -> tuple[tuple[Layout, int], ...]:
    """Return the departures of the last `RETURN_MS`."""
    return tuple(each for each in state.departures if now_ms - each[1] < RETURN_MS)


def busier_than(demand: Demand, horizon_s: float) -> Demand:
    """Return the demand at a rate that chance reaches now and then, or that may be the true one."""
    seconds = max(AGE_MIN_S, min(demand.age_s, horizon_s))
    return replace(demand, rate=demand.rate + STRESS * math.sqrt(demand.rate / seconds))


def _best(
    candidates: list[ScoredCandidate], now: ScoredCandidate, settings: PolicySettings
) -> ScoredCandidate:
    """Return the preferred candidate: the most goodput, and the fastest among equals.

    If no candidate beats the present one net of its switch, the cost of the switch is ignored: the
    layout would stay in place for long.
    """
    possible = [each for each in candidates if not each.score.refused] or candidates
    after = {id(each): each.after_switch(settings.horizon_ms) for each in possible}
    top = max(after.values())
    if now.score.refused or top > _beaten_at(now, settings):
        good = [each for each in possible if after[id(each)] >= top * AS_GOOD]
    else:
        top = max(each.worth for each in possible)
        good = [each for each in possible if each.worth >= top * AS_GOOD]
    return min(good, key=lambda each: each.cost)


def _overloaded(now: ScoredCandidate) -> bool:
    """Return whether most requests would miss their goals, and most are not yet late.

    Then speed leads to no arrangement that cannot meet the goals of even a few requests, if this
    one can: those that come before the queue has grown, and after it has ended, meet theirs here.
    """
    found = now.score
    late = found.asked - found.undecided
    is_late = late >= OVERLOAD_LATE * found.asked
    return not (found.refused or is_late) and found.attainment < OVERLOAD_ATTAINMENT


def _quiet(demands: list[Demand]) -> list[Demand]:
    """Return the demands of the same tiers and lengths at a rate that loads no group."""
    return [Demand(each.tier, each.goal, IDLE_RATE, each.prompts, each.output) for each in demands]


def _beaten_at(now: ScoredCandidate, settings: PolicySettings) -> float:
    """Return the worth above which another candidate serves the goals better."""
    goals = [settings.goals[Tier(each.tier)] for each in now.score.tiers]
    if all(each.ttft_s is None and each.tpot_s is None for each in goals):
        # However many requests wait, throughput alone counts.
        return now.worth * (1 + max(settings.gain_min, THROUGHPUT_GAIN_MIN))
    return now.worth + max(now.worth * settings.gain_min, now.score.undecided * SHARE_MIN)


@dataclass(frozen=True, slots=True)
class _Reason:
    words: str
    urgent: bool
    is_for_speed: bool = False


def _remember(state: State, best: ScoredCandidate, here: Arrangement, now_ms: int) -> State:
    name = best.arrangement.name
    if best.arrangement == here:
        return replace(state, preferred="", since_ms=0)
    return state if state.preferred == name else replace(state, preferred=name, since_ms=now_ms)


def _changed(
    state: State, reason: _Reason, now_ms: int, now: ScoredCandidate, settings: PolicySettings
) -> State:
    """Return what to remember when the layout changes from that of `now`.

    A change for speed that goals take back in time, before any request misses one, was no mistake.
    """
    previous = now.arrangement.layout
    if reason.is_for_speed:
        return replace(state, faster_ms=now_ms)
    is_late = bool(now.score.refused) or now.score.attainment < AS_GOOD
    if state.faster_ms is None or now_ms - state.faster_ms >= REGRET_MS or not is_late:
        return replace(state, faster_ms=None)
    most_ms = CAUTION_TIMES_MAX * settings.caution_ms
    is_again = now_ms - state.careful_until_ms < most_ms
    twice_ms = 2 * state.caution_ms if is_again else 0
    caution_ms = min(max(settings.caution_ms, twice_ms), most_ms)
    return replace(
        state,
        faster_ms=None,
        caution_ms=caution_ms,
        careful_until_ms=now_ms + caution_ms,
        avoided_groups=len(previous.groups),
    )


def _choose(
    observation: Observation,
    now: ScoredCandidate,
    best: ScoredCandidate,
    settings: PolicySettings,
    state: State,
) -> tuple[Verdict, State]:
    here, there = now.arrangement, best.arrangement

    def stay(reason: str) -> tuple[Verdict, State]:
        return Verdict(here, reason, changes=False), state

    if there == here:
        return stay(_words_for_best(now))
    reason = _why(now, best, settings)
    if reason is None:
        return stay(f"{there.name} would be only a little better")
    careful_ms = state.careful_until_ms - observation.time_ms
    if reason.is_for_speed and careful_ms > 0 and len(there.layout.groups) <= state.avoided_groups:
        seconds = -(-careful_ms // 1000)
        return stay(f"a layout this wide did not last: {there.name} may be tried in {seconds} s")
    # Even an urgent change needs two evaluations: a single one may be off by chance.
    settle_ms = settings.decide_every_ms if reason.urgent else settings.settle_ms
    if observation.time_ms - state.since_ms < settle_ms:
        return stay(f"{there.name} has looked better for too short a time")
    if there.layout != here.layout:
        if held := _held_back(observation, now, best, settings):
            return stay(f"{held}; otherwise {there.name}, because {reason.words}")
        state = _changed(state, reason, observation.time_ms, now, settings)
        before = _departures(state, observation.time_ms)
        state = replace(state, departures=(*before, (here.layout, observation.time_ms)))
    return Verdict(there, reason.words, changes=True), state


def _why(now: ScoredCandidate, best: ScoredCandidate, settings: PolicySettings) -> _Reason | None:
    """Return the reason why `best` is worth the change, or None."""
    if now.score.refused and not best.score.refused:
        return _Reason(f"{now.arrangement.name} cannot go on: {now.score.refused}", urgent=True)
    gained = best.after_switch(settings.horizon_ms)
    if gained > _beaten_at(now, settings):
        there, here = f"{best.score.attainment:.0%}", f"{now.score.attainment:.0%}"
        words = f"{there} of requests would meet their goals, {here} here"
        if there == here:
            # Only the score under a busier load, which worth includes, tells them apart.
            words = f"a little more load would cost {1 - now.worth / gained:.0%} of the goals here"
        return _Reason(words, urgent=gained > now.worth * (1 + URGENT_GAIN))
    needed = max(settings.latency_gain_min, best.lost_s / STAY_ASSUMED_S)
    if best.cost < now.cost * (1 - needed):
        faster = 1 - best.cost / now.cost
        words = f"it meets the goals as well, and costs {faster:.0%} less time"
        return _Reason(words, urgent=False, is_for_speed=True)
    return None


def _held_back(
    observation: Observation, now: ScoredCandidate, best: ScoredCandidate, settings: PolicySettings
) -> str:
    """Return why no switch is allowed now, or an empty string."""
    last = observation.switches[-1] if observation.switches else None
    if last is not None and last.ago_ms < settings.stay_ms:
        is_urgent = best.worth > now.worth * (1 + URGENT_GAIN) or bool(now.score.refused)
        returns = format_layout(best.arrangement.layout) == last.from_layout
        if returns or not is_urgent or last.ago_ms * 3 < settings.stay_ms:
            return f"the layout stays for at least {settings.stay_ms / 1000:g} s"
    own = [
        each for each in observation.switches if each.cause == POLICY and each.ago_ms < MINUTE_MS
    ]
    if len(own) >= settings.switches_per_minute_max:
        return f"{len(own)} switches in the last minute reach the limit"
    return ""


def _words_for_best(now: ScoredCandidate) -> str:
    if now.score.refused:
        return f"no layout is better, though {now.score.refused}"
    return f"it is the best: {now.score.attainment:.0%} of requests would meet their goals"


def _leaders(ranks: tuple[int, ...]) -> tuple[Rank, ...]:
    return tuple(Rank(rank) for rank in ranks)

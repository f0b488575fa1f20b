"""What an arrangement would make of the load: latencies, attainment of goals, throughput.

A group that batches continuously is a processor that is shared: a step takes A + B·tokens +
C·context, its tokens are one for each running task and the prompts that came during the step before
it, and so many tasks run as arrive during one's life (Little's law). The fixed point gives the time
per token; backlog of the same and more urgent tiers gives the wait; what arrives beyond what the
group can do lets it grow over the horizon. Goals are met in part around their limits, since
neither lengths nor arrivals are even. Called by `decide`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.policy.cost_model import GroupCost
from coordinator.policy.settings import TierGoal

SHARPNESS = 8.0
"""How steeply attainment falls where a prediction passes its goal: at 10 % beyond it, to a third."""

MOMENTS = (0.125, 0.375, 0.625, 0.875)
"""Parts of the horizon at which the queue is looked at."""

BUSY_MAX = 0.95
"""Waiting times are not predicted beyond this use: the queue's growth is what counts there."""

ROUNDS = 4
"""Iterations of the fixed point; what is left is under a percent."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one tier brings to a set of equal groups; counts and rates are of the whole set."""

    tier: int
    goal: TierGoal
    rate: float
    prompts: tuple[int, ...]
    output: float
    unstarted: float = 0.0
    unstarted_tokens: float = 0.0
    running: float = 0.0
    context: float = 0.0
    to_come: float = 0.0

    def part(self, share: float) -> "Demand":
        """Return a part of it."""
        return Demand(
            self.tier,
            self.goal,
            self.rate * share,
            self.prompts,
            self.output,
            self.unstarted * share,
            self.unstarted_tokens * share,
            self.running * share,
            self.context * share,
            self.to_come * share,
        )

    def under_way(self, share: float) -> "Demand":
        """Return a part of what runs, without what is to come in."""
        part = self.part(share)
        return replace(part, rate=0.0, unstarted=0.0, unstarted_tokens=0.0)

    def without_running(self, share: float) -> "Demand":
        """Return all but a part of what runs."""
        part = self.part(1 - share)
        return replace(
            self, running=part.running, context=part.context, to_come=part.to_come
        )

    @property
    def prompt(self) -> float:
        """The mean prompt."""
        return sum(self.prompts) / len(self.prompts)


@dataclass(frozen=True, slots=True)
class TierForecast:
    """What a tier is expected to see; `good` and `asked` are requests per second."""

    tier: int
    ttft_s: float
    tpot_s: float
    good: float
    asked: float
    cost: float
    """Latency in parts of the goals, or use of the groups where there is none; less is better."""


def forecast(
    cost: GroupCost, groups: int, demands: Sequence[Demand], horizon_s: float
) -> list[TierForecast]:
    """Return what each tier sees of `groups` equal groups that share these demands evenly."""
    per_group = [demand.part(1 / groups) for demand in sorted(demands, key=lambda each: each.tier)]
    load = _Load(cost, per_group, horizon_s)
    return [load.forecast(index, groups) for index in range(len(per_group))]


class _Load:
    """One group with its share of the demands, most urgent tier first."""

    __slots__ = ("_demands", "_horizon_s", "_step_s", "_use", "cost")

    def __init__(self, cost: GroupCost, demands: list[Demand], horizon_s: float) -> None:
        self.cost = cost
        self._demands = demands
        self._horizon_s = horizon_s
        self._step_s, limited = self._fixed_point()
        full_s = self._full_step_s()
        room = max(1e-3, 1 - cost.decode.base_s / full_s)
        used = 0.0
        self._use: list[float] = []
        """Of what the group can do, the part that this tier and the more urgent ones ask for."""
        for demand in demands:
            used += demand.rate * self._work_s(demand) / room * limited
            self._use.append(used)

    def _work_s(self, demand: Demand) -> float:
        """Seconds that one request takes of a group which is never idle."""
        cost = self.cost
        context = demand.prompt + demand.output / 2
        per_token = cost.decode.token_s + cost.decode.context_s * context
        return cost.prefill.token_s * demand.prompt + per_token * demand.output

    def _sums(self) -> tuple[float, float, float, float]:
        """Return running tasks, their context, decoded tokens/s and prompt tokens/s to be."""
        running = context = decodes = prefills = 0.0
        for each in self._demands:
            running += each.running
            context += each.context
            arriving = each.rate + each.unstarted / self._horizon_s
            decodes += arriving * each.output
            prefills += each.rate * each.prompt + each.unstarted_tokens / self._horizon_s
        return running, context, decodes, prefills

    def _mean_context(self) -> float:
        tokens = tasks = 0.0
        for each in self._demands:
            weight = each.rate * self._horizon_s + each.unstarted
            tokens += each.context + weight * (each.prompt + each.output / 2)
            tasks += each.running + weight
        return tokens / tasks if tasks else 0.0

    def _tasks_max(self) -> float:
        mean = self._mean_context()
        holds = self.cost.capacity_tokens / mean if mean else math.inf
        return max(1.0, min(self.cost.tasks_max, holds))

    def _full_step_s(self) -> float:
        """Seconds of a step that is as large as steps become under this load."""
        cost = self.cost
        _, _, decodes, prefills = self._sums()
        mean = self._mean_context()
        chunk = float(cost.chunk_tokens) if prefills else 0.0
        tasks = min(self._tasks_max(), 1 + decodes * 0.2)
        return cost.step_s(chunk + tasks, tasks * mean)

    def _fixed_point(self) -> tuple[float, float]:
        """Return seconds per step, and by what KV memory stretches the work."""
        cost = self.cost
        running, context, decodes, prefills = self._sums()
        to_come = sum(each.to_come for each in self._demands)
        mean = self._mean_context()
        tasks_max = self._tasks_max()
        left = to_come / running if running else 0.0
        step_s = cost.decode.base_s + cost.decode.token_s
        for _ in range(ROUNDS):
            still = running * min(1.0, left * step_s / self._horizon_s) if running else 0.0
            tasks = min(tasks_max, max(1.0, still + decodes * step_s))
            chunk = min(float(cost.chunk_tokens), prefills * step_s)
            step_s = cost.step_s(tasks + chunk, tasks * mean)
        wanted = decodes * step_s
        return step_s, max(1.0, wanted / tasks_max)

    def forecast(self, index: int, groups: int) -> TierForecast:
        """Return what one tier sees."""
        demand, goal = self._demands[index], self._demands[index].goal
        asked = demand.rate + demand.unstarted / self._horizon_s
        waits = self._waits(index, groups)
        firsts = [self._first_s(length) for length in demand.prompts]
        ttft = sum(waits) / len(waits) + sum(firsts) / len(firsts)
        use = self._use[index]
        before = self._use[index - 1] if index else 0.0
        served = 1.0 if use <= 1 else max(0.0, 1 - before) / max(use - before, 1e-9)
        good_first = (
            min(1.0, served) if goal.ttft_s is None else _mean_attained(goal.ttft_s, waits, firsts)
        )
        good_steps = 1.0 if goal.tpot_s is None else _attained(goal.tpot_s, self._step_s)
        under_way = demand.running / self._horizon_s
        good = asked * good_first * good_steps + under_way * good_steps
        if goal.ttft_s is None and goal.tpot_s is None:
            cost = self._use[-1] + 0.1 * self._step_s
        else:
            parts = [
                value / limit
                for value, limit in ((ttft, goal.ttft_s), (self._step_s, goal.tpot_s))
                if limit is not None
            ]
            cost = sum(parts) / len(parts)
        return TierForecast(
            demand.tier,
            ttft,
            self._step_s,
            good * groups * goal.weight,
            (asked + under_way) * groups * goal.weight,
            cost,
        )

    def _first_s(self, prompt: int) -> float:
        """Seconds from the first step of a prompt to its last, among what runs."""
        cost = self.cost
        steps = -(-prompt // cost.chunk_tokens)
        others = max(0.0, self._step_s - cost.decode.base_s)
        return cost.step_s(prompt, 0.0) + (steps - 1) * cost.decode.base_s + min(others, 1.0) / 2

    def _waits(self, index: int, groups: int) -> list[float]:
        """Return the wait for the first step at moments of the horizon, in seconds."""
        demand = self._demands[index]
        ahead = [each for each in self._demands[: index + 1]]
        cost = self.cost
        backlog = sum(each.unstarted_tokens for each in ahead)
        decode_s = max(0.0, self._step_s - cost.decode.base_s) / 2
        per_chunk = cost.step_s(cost.chunk_tokens, 0.0) + decode_s
        wait = backlog / cost.chunk_tokens * per_chunk
        use = self._use[index]
        # Others' prompts are in the way of one that comes at random; several groups are a choice.
        service = cost.step_s(demand.prompt, 0.0)
        prefill = sum(each.rate * cost.step_s(each.prompt, 0.0) for each in ahead)
        busy = min(prefill, BUSY_MAX)
        queueing = busy * service / (1 - busy) / groups
        residual = self._step_s / 2 if demand.rate else 0.0
        growth = (use - 1) * self._horizon_s
        return [max(0.0, wait + growth * moment) + queueing + residual for moment in MOMENTS]


def _mean_attained(goal_s: float, waits: Sequence[float], firsts: Sequence[float]) -> float:
    parts = [_attained(goal_s, wait + first) for wait in waits for first in firsts]
    return sum(parts) / len(parts)


def _attained(goal_s: float, seconds: float) -> float:
    """Return the part of requests that meet a goal where the mean is so many seconds."""
    exponent = SHARPNESS * math.log(max(seconds, 1e-6) / goal_s)
    return 1 / (1 + math.exp(min(exponent, 50.0)))

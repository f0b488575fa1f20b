"""What an arrangement makes of the load: latencies, attainment of goals, throughput.

A group that batches continuously is a shared processor. A step takes A + B·tokens + C·context; its
tokens are one per running task and the prompts that came during the step before; the running tasks
are those that arrive during one's life (Little's law). The fixed point gives the time per token.
Backlog of the same and more urgent tiers gives the wait, which grows over the horizon if arrivals
exceed the group's capacity. Near its limit a goal is met in part, as lengths and arrivals vary. A
step that borrows takes at least its floor, which hides what it computes. But prompts come in lumps:
one step has none and waits for its loans, and another has more than its loans hide.
`score` calls this module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.model.cost_model import GroupCost
from coordinator.model.policy_settings import TierGoal

SPREAD = 0.1
"""Least relative spread of what requests see around the mean."""

THROUGHPUT_WORTH = 0.2
"""Worth of a request that is served at all, relative to one that meets its goals."""

CERTAIN = 6.0
"""Logits beyond which the outcome is certain."""

MOMENTS = (0.2, 0.6)
"""Fractions of the horizon at which the queue is evaluated."""

BUSY_MAX = 0.95
"""Waiting times are capped at this use: above it, the queue's growth is what counts."""

ROUNDS = 3
"""Iterations of the mean step: only the part of lives within the horizon depends on itself."""

ROUNDS_OF_LOANS = 8
"""The same where a step waits for loans: how long depends on the prompts that come during it."""

LUMPS_MAX = 16
"""Most prompts of a step for which their number matters; more come evenly."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of one tier on a set of equal groups; counts and rates are of the whole set."""

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
    age_s: float = math.inf
    """How long the rate was observed."""
    unstarted_late: float = 0.0
    running_late: float = 0.0
    """Those of the unstarted and of the running tasks that have missed their goal already."""
    prompt: float = field(init=False)
    """The mean prompt."""

    def __post_init__(self) -> None:
        """Compute the mean prompt once."""
        object.__setattr__(self, "prompt", sum(self.prompts) / len(self.prompts))

    def part(self, share: float) -> "Demand":
        """Return a share of the demand."""
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
            self.age_s,
            self.unstarted_late * share,
            self.running_late * share,
        )

    def under_way(self, share: float) -> "Demand":
        """Return a share of the running tasks, without arrivals and unstarted ones."""
        part = self.part(share)
        return replace(part, rate=0.0, unstarted=0.0, unstarted_tokens=0.0, unstarted_late=0.0)

    def without_running(self, share: float) -> "Demand":
        """Return the demand without a share of the running tasks."""
        part = self.part(1 - share)
        return replace(
            self,
            running=part.running,
            context=part.context,
            to_come=part.to_come,
            running_late=part.running_late,
        )


@dataclass(frozen=True, slots=True)
class TierForecast:
    """The forecast of a tier; `good` and `asked` are requests per second."""

    tier: int
    ttft_s: float
    tpot_s: float
    good: float
    worth: float
    """`good`, and a little for every request that is served at all."""
    asked: float
    cost: float
    """Latency relative to the goals, or the groups' use if there are none; less is better."""
    use: float = 0.0
    """The share of its groups' capacity that arrivals of this and more urgent tiers need."""
    late: float = 0.0
    """The part of `asked` that cannot meet its goals any more."""


def forecast(
    cost: GroupCost, groups: int, demands: Sequence[Demand], horizon_s: float
) -> list[TierForecast]:
    """Return the forecast of each tier on `groups` equal groups that share these demands evenly."""
    per_group = [demand.part(1 / groups) for demand in sorted(demands, key=lambda each: each.tier)]
    load = _Load(cost, per_group, horizon_s)
    return [load.forecast(index, groups) for index in range(len(per_group))]


class _Load:
    """One group with its share of the demands, most urgent tier first."""

    __slots__ = (
        "_asked",
        "_demands",
        "_full_s",
        "_horizon_s",
        "_mean_context",
        "_slack_s",
        "_step_s",
        "_tasks_max",
        "_use",
        "cost",
    )

    def __init__(self, cost: GroupCost, demands: list[Demand], horizon_s: float) -> None:
        self.cost = cost
        self._demands = demands
        self._horizon_s = horizon_s
        self._mean_context = self._context()
        holds = cost.capacity_tokens / self._mean_context if self._mean_context else math.inf
        self._tasks_max = max(1.0, min(cost.tasks_max, holds))
        self._slack_s = 0.0
        """How long a step of a full group waits for its loans alone, on average."""
        self._full_s = self._full_step_s()
        self._step_s = self._mean_step_s()
        used = backlog = 0.0
        self._use: list[float] = []
        """The share of the group's capacity that this and more urgent tiers need."""
        self._asked: list[float] = []
        """The same, with waiting and running work to be done within the horizon."""
        for demand in demands:
            used += demand.rate * self._work_s(demand)
            backlog += self._backlog_s(demand) / horizon_s
            self._use.append(used)
            self._asked.append(used + backlog)

    def _token_s(self, demand: Demand) -> float:
        """Seconds of a full group's time per decoded token."""
        cost = self.cost
        context = demand.prompt + demand.output / 2
        base_s = cost.decode.base_s / self._tasks_max
        return base_s + cost.decode.token_s + cost.decode.context_s * context

    def _work_s(self, demand: Demand) -> float:
        """Seconds of a full group's time per request."""
        return self._taken_s(demand, demand.prompt, demand.output)

    def _taken_s(self, demand: Demand, prompts: float, outputs: float) -> float:
        """Seconds of a full group's time for reading and decoding these numbers of tokens."""
        token_s = self._token_s(demand) + self._slack_s / self._tasks_max
        return self.cost.prefill.token_s * prompts + token_s * outputs

    def _backlog_s(self, demand: Demand) -> float:
        """Seconds of work that wait or run."""
        to_come = demand.to_come + demand.unstarted * demand.output
        return self._taken_s(demand, demand.unstarted_tokens, to_come)

    def _context(self) -> float:
        """Return the mean context of a task over the horizon."""
        tokens = tasks = 0.0
        for each in self._demands:
            weight = each.rate * self._horizon_s + each.unstarted
            tokens += each.context + weight * (each.prompt + each.output / 2)
            tasks += each.running + weight
        return tokens / tasks if tasks else 0.0

    def _full_step_s(self) -> float:
        """Seconds of a step of a full group.

        It decodes for as many tasks as it holds, and reads the prompts of tasks that replace ended
        ones, as far as they fit into one step.
        """
        cost = self.cost
        mean = self._mean_context
        arriving = prompts = outputs = 0.0
        for each in self._demands:
            count = each.rate + each.unstarted / self._horizon_s
            arriving += count
            prompts += each.rate * each.prompt + each.unstarted_tokens / self._horizon_s
            outputs += count * each.output
        tasks = self._tasks_max
        if not arriving:
            tasks = min(tasks, sum(each.running for each in self._demands))
            decode_s = cost.decode.seconds(self._tasks_max, self._tasks_max * mean)
            self._slack_s = _slack_s(cost, decode_s, 0.0, 0.0)
            return cost.step_s(tasks, tasks * mean)
        chunk = min(float(cost.chunk_tokens), tasks * prompts / max(outputs, 1.0))
        if chunk >= cost.chunk_tokens:
            # Prompts fill the step before that many tasks run.
            tasks = min(tasks, chunk * outputs / max(prompts, 1.0))
        if not cost.floor_s:
            return cost.step_s(tasks + chunk, tasks * mean)
        read_s = cost.prefill.token_s * chunk
        count = chunk * arriving / prompts if prompts else 0.0
        self._slack_s = _slack_s(cost, cost.decode.seconds(tasks, tasks * mean), count, read_s)
        return cost.decode.seconds(tasks + chunk, tasks * mean) + self._slack_s

    def _mean_step_s(self) -> float:
        """Return seconds per step, averaged over the horizon.

        Running tasks go on for their remaining tokens, arriving ones for a life each, as far as it
        lies within the horizon. A step is linear in both and in the prompts that came during the
        one before, so its mean solves a linear equation; it is at most a full step, and at least
        the floor.
        """
        cost, horizon_s, full_s = self.cost, self._horizon_s, self._full_s
        per_task = cost.decode.token_s + cost.decode.context_s * self._mean_context
        running = sum(each.running for each in self._demands)
        remaining = sum(each.to_come for each in self._demands) / running if running else 0.0
        step_s = min(full_s, max(cost.floor_s, 2 * cost.decode.seconds(1, 0)))
        for _ in range(ROUNDS_OF_LOANS if cost.floor_s else ROUNDS):
            staying = running * min(1.0, remaining * step_s / horizon_s)
            busy = prompts = count = 0.0
            for each in self._demands:
                arriving = each.rate + each.unstarted / horizon_s
                count += arriving
                busy += arriving * each.output * _lived(each.output * step_s, horizon_s)
                prompts += each.rate * each.prompt + each.unstarted_tokens / horizon_s
            at_rest = cost.decode.base_s + per_task * max(1.0, staying)
            share = per_task * busy + cost.prefill.token_s * prompts
            if cost.floor_s:
                decode_s = at_rest + per_task * busy * step_s
                read_s = cost.prefill.token_s * prompts * step_s
                at_rest += _slack_s(cost, decode_s, count * step_s, read_s)
            step_s = full_s if share >= 1 else min(full_s, at_rest / (1 - share))
        return step_s

    def forecast(self, index: int, groups: int) -> TierForecast:
        """Return the forecast of one tier."""
        demand, goal = self._demands[index], self._demands[index].goal
        asked = demand.rate + demand.unstarted / self._horizon_s
        waits, queueing = self._waits(index, groups)
        firsts = [self._first_s(length) for length in demand.prompts]
        ttft = sum(waits) / len(waits) + queueing + sum(firsts) / len(firsts)
        use = self._asked[index]
        before = self._asked[index - 1] if index else 0.0
        served = 1.0 if use <= 1 else max(0.0, 1 - before) / max(use - before, 1e-9)
        served = min(1.0, served)
        good_first = served
        if goal.ttft_s is not None:
            good_first = _mean_attained(goal.ttft_s, waits, firsts, queueing)
        good_steps = 1.0
        if goal.tpot_s is not None:
            good_steps = _attained(goal.tpot_s, self._step_s, SPREAD + self._unevenness(demand))
        under_way = demand.running / self._horizon_s
        # What is late already cannot meet its goal: only that it is served has worth.
        in_time = asked - demand.unstarted_late / self._horizon_s
        running_in_time = under_way - demand.running_late / self._horizon_s
        good = in_time * good_first * good_steps + running_in_time * good_steps
        worth = good + THROUGHPUT_WORTH * (asked + under_way) * served
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
            worth * groups * goal.weight,
            (asked + under_way) * groups * goal.weight,
            cost,
            self._use[index],
            (asked + under_way - in_time - running_in_time) * groups * goal.weight,
        )

    def _first_s(self, prompt: int) -> float:
        """Seconds from the first step of a prompt to its last, among running tasks."""
        others = max(0.0, self._step_s - self.cost.rest_s)
        return self.cost.first_s(prompt) + min(others, 1.0) / 2

    def _unevenness(self, demand: Demand) -> float:
        """Return the relative spread of the time per token between tasks of the same length.

        Prompts of others come in lumps, a random number of them during a task.
        """
        variance = 0.0
        hidden_s = self.cost.rest_s - self.cost.decode.base_s
        for each in self._demands:
            lump_s = max(0.0, self.cost.prefill.token_s * each.prompt - hidden_s)
            arriving = each.rate + each.unstarted / self._horizon_s
            variance += arriving * self._step_s / max(1.0, demand.output) * lump_s * lump_s
        return math.sqrt(variance) / self._step_s

    def _waits(self, index: int, groups: int) -> tuple[list[float], float]:
        """Return the wait for the first step at `MOMENTS`, and the mean wait that chance adds.

        Both are in seconds.
        """
        demand = self._demands[index]
        ahead = list(self._demands[: index + 1])
        cost = self.cost
        backlog = sum(each.unstarted_tokens for each in ahead)
        decode_s = max(0.0, self._step_s - cost.rest_s) / 2
        per_chunk = cost.step_s(cost.chunk_tokens, 0.0) + decode_s
        wait = backlog / cost.chunk_tokens * per_chunk
        use = self._use[index]
        # A random arrival meets others' prompts; with several groups it can avoid them.
        service = cost.compute_s(demand.prompt, 0.0)
        prefill = sum(each.rate * cost.compute_s(each.prompt, 0.0) for each in ahead)
        busy = min(prefill, BUSY_MAX)
        queueing = busy * service / (1 - busy) / groups
        residual = self._step_s / 2 if demand.rate else 0.0
        growth = (use - 1) * self._horizon_s
        waits = [max(0.0, wait + growth * moment) + residual for moment in MOMENTS]
        return waits, queueing


def _slack_s(cost: GroupCost, decode_s: float, count: float, read_s: float) -> float:
    """Return how long a step waits for its loans with nothing to compute, on average, in seconds.

    It decodes for `decode_s`. By chance it reads more or fewer than `count` prompts, which take
    `read_s` together.
    """
    idle_s = cost.floor_s - decode_s
    if idle_s <= 0:
        return 0.0
    if count <= 0 or count > LUMPS_MAX:
        return max(0.0, idle_s - read_s)
    slack_s, chance = 0.0, math.exp(-count)
    for number in range(4 * LUMPS_MAX):
        remaining_s = idle_s - number * read_s / count
        if remaining_s <= 0:
            break
        slack_s += chance * remaining_s
        chance *= count / (number + 1)
    return slack_s


def _lived(life_s: float, horizon_s: float) -> float:
    """Return the share of a task's life within the horizon, if the task arrives within it."""
    if life_s >= horizon_s:
        return horizon_s / (2 * life_s)
    return 1 - life_s / (2 * horizon_s)


def _mean_attained(
    goal_s: float, waits: Sequence[float], firsts: Sequence[float], queueing_s: float
) -> float:
    """Return the share of requests that get their first token in time.

    The wait that chance adds is distributed exponentially.
    """
    total = 0.0
    for wait in waits:
        for first in firsts:
            slack_s = goal_s - wait - first
            if slack_s > 0:
                by_chance = math.exp(-slack_s / queueing_s) if queueing_s > 0 else 0.0
                total += _attained(goal_s, wait + first, SPREAD) * (1 - by_chance)
    return total / (len(waits) * len(firsts))


def _attained(goal_s: float, seconds: float, spread: float) -> float:
    """Return the share of requests that meet a goal if the mean is `seconds`.

    Logistic in the logarithm, whose standard deviation is 1.8 over its steepness.
    """
    exponent = 1.8 / spread * math.log(max(seconds, 1e-6) / goal_s)
    if abs(exponent) > CERTAIN:
        return 0.0 if exponent > 0 else 1.0
    return 1 / (1 + math.exp(exponent))

"""A simulated cell: takes arrivals and returns the times of each request.

The task table, the placement and the decision are the product's. Groups are modelled, and a switch
takes the cost model's time after the running step of each changed group. Tests call this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from comm_pool.layout import Group, Layout, Rank, diff, format_layout
from coordinator.model.cost_model import CostModel
from coordinator.model.observation import GroupObservation, Observation, SwitchObservation
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.alternation import AlternationPhase
from coordinator.policy.alternator import AlternationView, Alternator
from coordinator.policy.arrivals import Arrivals
from coordinator.policy.candidates import Arrangement, LayoutSpace
from coordinator.policy.decide import State as PolicyState
from coordinator.policy.decide import decide
from coordinator.policy.observe import observe_tiers
from coordinator.protocol.messages.gateway import CellLoad
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import Binding, Carry, TaskId, Tier
from coordinator.tasks.displacement import displaced
from coordinator.tasks.placement import OpenGroup
from coordinator.tasks.task import State, Task
from coordinator.tasks.task_table import TaskTable
from tools.simulator.group import SimGroup, SimTask

BLOCK_TOKENS = 16
AGEING_MS = 30_000
MINUTE_MS = 60_000

HEARTBEAT_S = 0.2
"""How often leaders report the progress of their tasks, as by default."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come."""

    at_s: float
    tier: Tier
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times of one request, in seconds; `first_s` and `end_s` are None if they never came."""

    tier: Tier
    arrive_s: float
    first_s: float | None
    end_s: float | None
    output: int

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.arrive_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if self.end_s is None or self.first_s is None:
            return None
        return (self.end_s - self.first_s) / max(1, self.output - 1)


@dataclass(slots=True)
class Run:
    """The result of a load: every request, and every switch as (time, layout, reason)."""

    requests: list[RequestTimes] = field(default_factory=list)
    switches: list[tuple[float, str, str]] = field(default_factory=list)

    def good(self, settings: PolicySettings) -> int:
        """Return how many requests ended within their goals."""
        return sum(is_good(each, settings) for each in self.requests)

    def goodput(self, settings: PolicySettings) -> float:
        """Return the same in worth: a request counts the weight of its tier."""
        good = (each for each in self.requests if is_good(each, settings))
        return sum(settings.goals[each.tier].weight for each in good)

    def latency(self, settings: PolicySettings, until_s: float) -> float:
        """Return the mean latency in units of the goals; 0 if no request has goals."""
        found = [latency_in_goals(each, settings, until_s) for each in self.requests]
        counted = [each for each in found if each is not None]
        return sum(counted) / len(counted) if counted else 0.0


def latency_in_goals(times: RequestTimes, settings: PolicySettings, until_s: float) -> float | None:
    """Return ½(TTFT/goal + TPOT/goal); None for a tier without goals.

    A request that is incomplete at `until_s` is charged the time that it has taken so far.
    """
    goal = settings.goals[times.tier]
    parts = []
    if goal.ttft_s is not None:
        first_s = until_s if times.first_s is None else times.first_s
        parts.append((first_s - times.arrive_s) / goal.ttft_s)
    if goal.tpot_s is not None:
        tpot_s = times.tpot_s
        if tpot_s is None:
            begun_s = times.arrive_s if times.first_s is None else times.first_s
            tpot_s = (until_s - begun_s) / max(1, times.output - 1)
        parts.append(tpot_s / goal.tpot_s)
    return sum(parts) / len(parts) if parts else None


def is_good(times: RequestTimes, settings: PolicySettings) -> bool:
    """Return whether a request ended and met its tier's goals."""
    goal = settings.goals[times.tier]
    ttft_s, tpot_s = times.ttft_s, times.tpot_s
    if ttft_s is None or tpot_s is None:
        return False
    in_ttft = goal.ttft_s is None or ttft_s <= goal.ttft_s
    return in_ttft and (goal.tpot_s is None or tpot_s <= goal.tpot_s)


class SimCell:
    """Runs one load in one cell; `space` is None for a fixed layout."""

    def __init__(
        self,
        layout: Layout,
        costs: CostModel,
        settings: PolicySettings,
        space: LayoutSpace | None = None,
    ) -> None:
        self._costs = costs
        self._settings = settings
        self._space = space
        self._here = Arrangement(layout)
        self._target: Arrangement | None = None
        self._pause_context = 0
        self._table = TaskTable(AGEING_MS)
        self._arrivals = Arrivals()
        self._tasks: dict[str, SimTask] = {}
        self._carried: list[tuple[SimTask, Group]] = []
        self._state = PolicyState()
        self._alternator = Alternator() if space is not None and settings.alternates else None
        self._carry = Carry.RESHARD
        self._paused: dict[Group, list[SimTask]] = {}
        """The tasks of groups that were left with their KV in place."""
        self._events: list[tuple[float, int, str, object]] = []
        self._order = count()
        self._epoch = 1
        self._switches: list[tuple[int, str, str]] = []
        self._groups: dict[Rank, SimGroup] = {}
        self._now_s = 0.0
        self._offered = 0
        self._has_begun = False
        self._form(layout)
        self.result = Run()

    def run(self, arrivals: Sequence[Arrival], until_s: float) -> Run:
        """Serve these requests, in order of their times, and stop at `until_s`."""
        for each in arrivals:
            self.offer(each)
        self.advance(until_s)
        return self.end()

    def offer(self, arrival: Arrival) -> None:
        """Schedule a request, not before the time already simulated."""
        self._push(arrival.at_s, "arrival", (self._offered, arrival))
        self._offered += 1

    def advance(self, until_s: float) -> None:
        """Process all events up to `until_s`."""
        if not self._has_begun:
            self._has_begun = True
            if self._space is not None:
                self._push(0.0, "tick", None)
            self._push(HEARTBEAT_S, "grow", None)
        while self._events and self._events[0][0] <= until_s:
            self._now_s, _, kind, what = heappop(self._events)
            self._handle(kind, what)

    @property
    def load(self) -> CellLoad:
        """The load of the cell, as its coordinator publishes it to gateways."""
        serving = [each for each in self._groups.values() if not each.stopping]
        room = sum(each.cost.capacity_tokens for each in serving)
        used = sum(each.context for each in serving)
        tasks = self._table
        return CellLoad(
            queued=tuple(tasks.queue.count(tier) for tier in Tier),
            running=sum(tasks.loads.tasks(leader) for leader in self._groups),
            tasks_max=sum(each.cost.tasks_max for each in serving),
            blocks_free=max(0, room - used) // BLOCK_TOKENS,
            blocks_total=room // BLOCK_TOKENS,
        )

    @property
    def alternation(self) -> AlternationView | None:
        """What the alternation of batch work did, if the policy may alternate."""
        return None if self._alternator is None else self._alternator.view

    def end(self) -> Run:
        """Return the results; requests in progress count as incomplete."""
        for task in self._tasks.values():
            header = task.task.header
            self.result.requests.append(
                RequestTimes(header.tier, task.arrive_s, task.first_s, None, task.output)
            )
        return self.result

    def _push(self, at_s: float, kind: str, what: object) -> None:
        heappush(self._events, (at_s, next(self._order), kind, what))

    @property
    def _now_ms(self) -> int:
        return int(self._now_s * 1000)

    def _handle(self, kind: str, what: object) -> None:
        match kind, what:
            case "arrival", (int(index), Arrival() as arrival):
                self._arrive(index, arrival)
            case "step", (SimGroup() as group, int(version)):
                if group.version == version and group.ends_s is not None:
                    self._stepped(group)
            case "tick", None:
                self._decide()
                self._push(self._now_s + self._settings.decide_every_ms / 1000, "tick", None)
            case "grow", None:
                self._grow()
                self._push(self._now_s + HEARTBEAT_S, "grow", None)
            case "switched", None:
                self._switched()

    # ------------------------------------------------------------------ tasks

    def _arrive(self, index: int, arrival: Arrival) -> None:
        header = TaskHeader(
            TaskId(f"t{index}"), "sim", "", arrival.prompt, arrival.output, arrival.tier
        )
        task = Task(header, index, self._now_ms, State.QUEUED, self._now_ms, payload=b"")
        self._tasks[header.task] = SimTask(task, arrival.output, self._now_s)
        self._table.add(task)
        self._arrivals[arrival.tier].on_arrival(arrival.prompt, self._now_ms)
        self._place()

    def _place(self) -> None:
        if not self._table.queue:
            return
        for task in displaced(self._table, self._open_groups(), self._now_ms):
            assert task.leader is not None
            task.displacements += 1
            of_task = self._groups[task.leader]
            of_task.drop(self._tasks[task.id], self._now_s)
            if of_task.ends_s is not None:
                self._push(of_task.ends_s, "step", (of_task, of_task.version))
            self._table.enter(task, State.QUEUED, self._now_ms)
        is_held = self._alternation is AlternationPhase.DECODE
        chosen = self._table.loads.choose(
            self._open_groups(),
            self._table.queue,
            self._table.__getitem__,
            self._now_ms,
            {Tier.BATCH} if is_held else (),
        )
        for task, group in chosen:
            self._table.queue.placed(task, self._now_ms)
            self._table.enter(task, State.PLACED, self._now_ms, group.leader)
            self._give(self._groups[group.leader], self._tasks[task.id])

    @property
    def _alternation(self) -> AlternationPhase:
        return AlternationPhase.OFF if self._alternator is None else self._alternator.phase

    def _open_groups(self) -> list[OpenGroup]:
        reserved = self._here.reserved
        return [
            OpenGroup(
                Binding(each.group, 1),
                each.cost.tasks_max,
                each.cost.capacity_tokens // BLOCK_TOKENS,
                BLOCK_TOKENS,
                self._here.tiers if each.group.leader in reserved else 0,
            )
            for each in self._groups.values()
            if not each.stopping
        ]

    def _give(self, group: SimGroup, task: SimTask) -> None:
        group.add(task, self._now_s)
        if group.ends_s is None:
            self._start(group)
        else:
            self._push(group.ends_s, "step", (group, group.version))

    def _start(self, group: SimGroup) -> None:
        if group.start(self._now_s):
            assert group.ends_s is not None
            self._push(group.ends_s, "step", (group, group.version))

    def _stepped(self, group: SimGroup) -> None:
        done = group.finish(self._now_s)
        for task in done:
            header = task.task.header
            del self._tasks[header.task]
            self._table.remove(task.task)
            self._arrivals[header.tier].on_end(task.output)
            if self._alternator is not None:
                self._alternator.on_end(header.tier)
            self.result.requests.append(
                RequestTimes(header.tier, task.arrive_s, task.first_s, self._now_s, task.output)
            )
        if group.stopping:
            self._stopped()
        else:
            self._start(group)
        if done:
            self._place()

    def _grow(self) -> None:
        """Record the progress of tasks, as leaders report it."""
        for group in self._groups.values():
            for _, _, task in group.decoding:
                self._table.grow(task.task, group.generated(task), self._now_ms)

    # ------------------------------------------------------------------ switches

    def _form(self, layout: Layout) -> None:
        for group in layout.groups:
            if group.leader not in self._groups:
                cost = self._costs.groups[group.name]
                room = max(0, cost.capacity_tokens - self._paused_tokens(group))
                self._groups[group.leader] = SimGroup(group, replace(cost, capacity_tokens=room))

    def _paused_tokens(self, group: Group) -> int:
        """Return how much of the group's KV others' paused tasks hold."""
        found = 0.0
        for other, tasks in self._paused.items():
            if other != group:
                shared = len(set(other.ranks) & set(group.ranks)) / other.width
                found += shared * sum(task.task.context_tokens for task in tasks)
        return int(found)

    def _decide(self) -> None:
        assert self._space is not None
        observation = self._observe()
        current = self._here.layout
        decided, state = decide(
            observation, current, self._space, self._costs, self._settings, self._state
        )
        verdict = decided
        if self._alternator is not None:
            switches_max = self._settings.switches_per_minute_max
            verdict = self._alternator.look(
                observation, current, decided, self._costs, switches_max, lambda _: True
            )
        if verdict is decided:
            self._state = state
        if verdict.changes:
            self._carry = verdict.carry or Carry.RESHARD
            self._change(verdict.choice, verdict.reason)
        else:
            self._place()

    def _change(self, choice: Arrangement, reason: str) -> None:
        if choice.layout == self._here.layout:
            self._here = choice
            self._vacate()
            self._place()
            return
        names = format_layout(self._here.layout), format_layout(choice.layout)
        self._switches.append((self._now_ms, *names))
        self.result.switches.append((self._now_s, choice.name, reason))
        self._target = choice
        changed = diff(self._here.layout, choice.layout)
        self._here = Arrangement(self._here.layout)
        for leader, group in list(self._groups.items()):
            if leader in changed:
                group.stopping = True
                group.cut(self._now_s)
                if group.ends_s is not None:
                    self._push(group.ends_s, "step", (group, group.version))
        self._stopped()

    def _observe(self) -> Observation:
        tiers, by_leader = observe_tiers(
            self._table, self._arrivals, self._settings.goals, self._now_ms
        )
        recent = [each for each in self._switches if self._now_ms - each[0] < MINUTE_MS]
        return Observation(
            time_ms=self._now_ms,
            layout=format_layout(self._here.layout),
            epoch=self._epoch,
            is_switching=self._target is not None,
            tiers=tiers,
            groups=tuple(
                GroupObservation(
                    each.group.name,
                    int(leader),
                    tuple(by_leader.get(leader, ())),
                    blocks_free=max(0, each.cost.capacity_tokens - each.context) // BLOCK_TOKENS,
                    blocks_total=each.cost.capacity_tokens // BLOCK_TOKENS,
                )
                for leader, each in self._groups.items()
            ),
            switches=tuple(
                SwitchObservation(self._now_ms - at, before, after, "policy")
                for at, before, after in recent
            ),
            reserved=tuple(int(rank) for rank in self._here.reserved),
            reserved_tiers=self._here.tiers,
        )

    def _stopped(self) -> None:
        """Begin the switch once every group that changes has ended its step."""
        stopping = [each for each in self._groups.values() if each.stopping]
        if any(each.ends_s is not None for each in stopping) or self._target is None:
            return
        context = 0
        for group in stopping:
            held, fresh = group.give_up()
            if self._carry is Carry.PAUSE:
                self._paused[group.group] = held
                for task in held:
                    self._table.enter(task.task, State.PAUSED, self._now_ms, group.group.leader)
            else:
                context += group.context
                self._carried += [(task, group.group) for task in held]
            for task in fresh:
                self._table.enter(task.task, State.QUEUED, self._now_ms)
            del self._groups[group.group.leader]
        ranks = max(1, len(diff(self._here.layout, self._target.layout)))
        seconds = self._costs.switch.seconds(context / ranks)
        self._push(self._now_s + seconds, "switched", None)

    def _switched(self) -> None:
        assert self._target is not None
        self._here, self._target = self._target, None
        self._epoch += 1
        self._form(self._here.layout)
        for old in list(self._paused):
            self._resume(old)
        carried, self._carried = self._carried, []
        for task, old in carried:
            leader = self._adopter(task, old)
            if leader is None:
                task.has_kv = False
                self._table.enter(task.task, State.QUEUED, self._now_ms)
                continue
            self._table.enter(task.task, State.PLACED, self._now_ms, leader)
            self._give(self._groups[leader], task)
        self._vacate()
        self._place()

    def _resume(self, old: Group) -> None:
        """Let paused tasks go on in their group, or compute them again if none comes back."""
        if old not in self._here.layout.groups:
            if self._alternation is AlternationPhase.PREFILL:
                return
            for task in self._paused.pop(old):
                task.has_kv = False
                self._table.enter(task.task, State.QUEUED, self._now_ms)
            return
        for task in self._paused.pop(old):
            self._table.enter(task.task, State.PLACED, self._now_ms, old.leader)
            self._give(self._groups[old.leader], task)

    def _vacate(self) -> None:
        """Return unstarted tasks of groups that are reserved for more urgent tiers to the queue."""
        for leader in self._here.reserved:
            for task in self._groups[leader].take_waiting(self._here.tiers):
                self._table.enter(task.task, State.QUEUED, self._now_ms)

    def _adopter(self, task: SimTask, old: Group) -> Rank | None:
        """Return the leader that adopts a task: of the emptiest group on ranks that have its KV.

        Groups that the reservations keep for other tiers come last.
        """
        needed = task.task.context_tokens
        near = [
            each
            for each in self._groups.values()
            if not set(old.ranks).isdisjoint(each.group.ranks)
            and each.context + needed <= each.cost.capacity_tokens
        ]
        if not near:
            return None
        tier = int(task.task.header.tier)
        reserved = self._here.reserved

        def order(each: SimGroup) -> tuple[bool, int, Rank]:
            is_right = not reserved or (each.group.leader in reserved) == (tier < self._here.tiers)
            return not is_right, each.context, each.group.leader

        return min(near, key=order).group.leader

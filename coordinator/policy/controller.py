"""The policy controller of a running cell: evaluates it on a clock and returns verdicts.

It owns what a decision needs beyond the cell itself: arrivals, knowledge of costs, reserved groups,
and how long an operator's layout stays pinned. The core calls it and starts the switches. Pure: the
clock is an argument.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from comm_pool.layout import Layout, Rank, format_layout
from coordinator.model.events import Expected
from coordinator.model.observation import GroupObservation, Observation, SwitchObservation
from coordinator.model.observation_log import CostRecord, cost_record
from coordinator.model.policy_settings import PolicySettings, PolicyStart
from coordinator.model.records import SwitchRecord
from coordinator.policy.alternation import AlternationPhase
from coordinator.policy.alternator import AlternationView, Alternator
from coordinator.policy.arrivals import Arrivals
from coordinator.policy.decide import MINUTE_MS, State, Verdict, decide
from coordinator.policy.forecast import forecast_of
from coordinator.policy.knowledge import Knowledge
from coordinator.policy.observe import observe_tiers
from coordinator.protocol.messages.gateway import Submit
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.protocol.terms import EndCause
from coordinator.ranks.layout_check import why_unreachable
from coordinator.ranks.roster import Roster
from coordinator.switching.switcher import Switcher
from coordinator.tasks.task_table import TaskTable

COSTS_EVERY_MS = 30_000
"""How often the costs go into the observation log."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: observation and verdict; `costs` are set when they are due for the log.

    `expected` is the forecast of each tier if the serving layout stays.
    """

    observation: Observation
    verdict: Verdict
    costs: CostRecord | None
    expected: tuple[Expected, ...] = ()


class PolicyController:
    """Chooses the layout of a cell."""

    __slots__ = (
        "_alternator",
        "_arrivals",
        "_costs_due_ms",
        "_due_ms",
        "_knowledge",
        "_pinned_until_ms",
        "_reserved",
        "_reserved_layout",
        "_start",
        "_state",
        "_tiers",
    )

    def __init__(self, start: PolicyStart) -> None:
        self._knowledge = Knowledge(start.widths, start.step_times)
        self._arrivals = Arrivals()
        self._alternator = Alternator()
        self._state = State()
        self._due_ms = 0
        self._costs_due_ms = 0
        self._pinned_until_ms = 0
        self._reserved_layout: Layout | None = None
        self._reserved: tuple[Rank, ...] = ()
        self._tiers = 0
        self._start = start
        self.change_settings(start.settings)

    @property
    def horizon_ms(self) -> int:
        """The length of the forecast."""
        return self._start.settings.horizon_ms

    @property
    def alternation(self) -> AlternationView:
        """What the alternation of batch work is and did."""
        return self._alternator.view

    @property
    def holds_batch(self) -> bool:
        """Whether batch tasks that no rank has begun wait while others decode."""
        return self._alternator.phase is AlternationPhase.DECODE

    @property
    def pauses_batch(self) -> bool:
        """Whether batch tasks are paused for as long as prompts are read."""
        return self._alternator.phase is AlternationPhase.PREFILL

    def change_settings(self, settings: PolicySettings) -> None:
        """Decide by other goals and limits from now on."""
        self._start = replace(self._start, settings=settings)
        self._alternator.is_wanted = settings.alternates

    def reserved_groups(self, layout: Layout) -> dict[Rank, int]:
        """Return `layout`'s reserved groups: leader -> number of the most urgent tiers."""
        return dict.fromkeys(self._reserved, self._tiers) if layout == self._reserved_layout else {}

    def on_submit(self, message: Submit, now_ms: int) -> None:
        """Count a new task."""
        header = message.header
        self._arrivals[header.tier].on_arrival(header.prompt_tokens, now_ms)

    def on_hello(self, hello: RankHello) -> None:
        """Add a rank's start-up measurements."""
        self._knowledge.on_hello(hello)

    def on_report(self, report: Report, tasks: TaskTable) -> None:
        """Add a leader's served steps and ended tasks, before the pool forgets these tasks."""
        self._knowledge.on_report(report)
        for ended in report.ended:
            task = tasks.get(ended.task)
            if task is not None and ended.cause is EndCause.FINISHED:
                self._arrivals[task.header.tier].on_end(ended.generated)
                self._alternator.on_end(task.header.tier)

    def on_switch(self, record: SwitchRecord) -> None:
        """Add the times of a switch."""
        self._knowledge.on_switch(record)

    def pin(self, now_ms: int) -> None:
        """Leave the layout alone for a while: an operator chose it."""
        self._pinned_until_ms = now_ms + self._start.settings.pin_ms
        self._state = State()

    def keep(self, verdict: Verdict) -> None:
        """Reserve the groups of the verdict; it applies once the verdict's layout is the target."""
        choice = verdict.choice
        self._reserved_layout = choice.layout
        self._reserved, self._tiers = choice.reserved, choice.tiers

    def look(
        self, switcher: Switcher, roster: Roster, tasks: TaskTable, now_ms: int
    ) -> Evaluation | None:
        """Evaluate the cell if that is due; the caller carries out the verdict."""
        if now_ms < self._due_ms or switcher.recovering or not switcher.alive:
            return None
        self._due_ms = now_ms + self._start.settings.decide_every_ms
        costs = self._knowledge.costs(roster, switcher.alive)
        space = self._knowledge.space(roster, switcher.alive)
        current = switcher.target.layout
        observation = self._observe(switcher, roster, tasks, now_ms)
        settings = self._start.settings
        decided, state = decide(observation, current, space, costs, settings, self._state)
        switches_max = settings.switches_per_minute_max

        def is_usable(layout: Layout) -> bool:
            return why_unreachable(layout, roster, switcher.alive) is None

        verdict = self._alternator.look(
            observation, current, decided, costs, switches_max, is_usable
        )
        if verdict is decided:
            self._state = state
        cost_line = None
        if now_ms >= self._costs_due_ms:
            self._costs_due_ms = now_ms + COSTS_EVERY_MS
            modes = self._knowledge.modes(roster, switcher.alive)
            pipelines = self._knowledge.pipelines(roster, switcher.alive)
            cost_line = cost_record(now_ms, roster.world, modes, costs, settings, pipelines)
        expected = forecast_of(observation, current, verdict, costs, settings)
        return Evaluation(observation, verdict, cost_line, expected)

    def _observe(
        self, switcher: Switcher, roster: Roster, tasks: TaskTable, now_ms: int
    ) -> Observation:
        tiers, by_leader = observe_tiers(tasks, self._arrivals, self._start.settings.goals, now_ms)
        layout = switcher.target.layout
        reserved = self.reserved_groups(layout)
        return Observation(
            time_ms=now_ms,
            layout=format_layout(layout, roster.world),
            epoch=switcher.epoch,
            is_switching=not switcher.is_serving,
            tiers=tiers,
            groups=_groups(layout, roster, by_leader, tasks),
            switches=_recent(switcher, now_ms),
            pinned_ms=max(0, self._pinned_until_ms - now_ms),
            reserved=tuple(int(rank) for rank in reserved),
            reserved_tiers=self._tiers if reserved else 0,
        )


def _groups(
    layout: Layout, roster: Roster, by_leader: Mapping[int, Collection[int]], tasks: TaskTable
) -> tuple[GroupObservation, ...]:
    found = []
    for group in layout.groups:
        report = roster.report_of(group.leader)
        found.append(
            GroupObservation(
                name=group.name,
                leader=int(group.leader),
                tasks=tuple(by_leader.get(group.leader, ())),
                tokens=tasks.loads.tokens(group.leader),
                blocks_free=report.blocks_free if report else 0,
                blocks_total=report.blocks_total if report else 0,
            )
        )
    return tuple(found)


def _recent(switcher: Switcher, now_ms: int) -> tuple[SwitchObservation, ...]:
    """Return the switches of the last minute, oldest first."""
    newest = switcher.log.last(64)
    return tuple(
        SwitchObservation(now_ms - each.started_ms, each.from_layout, each.to_layout, each.cause)
        for each in newest
        if now_ms - each.started_ms < MINUTE_MS and each.from_layout != each.to_layout
    )

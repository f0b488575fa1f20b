"""Runs an observation log again under another policy, and compares the choices. Pure.

The load of each observation is as logged, the layout is the replay's. So it shows decisions, not
the queue that they would have led to; the simulator shows that. `aileron replay` calls this module.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from comm_pool.layout import Layout, format_layout, parse_layout
from comm_pool.mixed import read_staged
from coordinator.model.cost_model import CostModel
from coordinator.model.observation import Observation, SwitchObservation
from coordinator.model.observation_log import CostRecord, Line, costs_of, settings_of
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.candidates import Arrangement, LayoutSpace
from coordinator.policy.decide import MINUTE_MS, POLICY, State, decide
from coordinator.policy.demand import demands_of
from coordinator.policy.score import score


@dataclass(frozen=True, slots=True)
class Replayed:
    """One observation: the logged and the replayed arrangement; shares of requests in goal."""

    time_ms: int
    was: str
    now: str
    was_met: float
    now_met: float
    asked: float
    reason: str
    """Why the replay changed something here; empty if it did not."""


class ReplayError(ValueError):
    """A log that cannot be run again; the message is one sentence."""


def replay(
    lines: Iterable[Line],
    *,
    is_adaptive: bool,
    layout: str | None = None,
    changed: Mapping[str, float] | None = None,
) -> list[Replayed]:
    """Run a log again; raises `ReplayError`."""
    run: _Run | None = None
    found: list[Replayed] = []
    for line in lines:
        if isinstance(line, CostRecord):
            settings = settings_of(line, changed or {})
            space = LayoutSpace(
                line.world, line.modes, pipelines=[*map(read_staged, line.pipelines)]
            )
            if run is None:
                run = _Run(line.world, is_adaptive, costs_of(line), settings, space)
                run.widths = tuple(line.modes)
            run.costs, run.settings, run.space = costs_of(line), settings, space
        elif run is None:
            raise ReplayError(
                "it does not begin with costs: name a file that `policy.observation_log` wrote."
            )
        elif not line.is_switching:
            found.append(run.step(line, layout))
    if not found:
        raise ReplayError("it holds no observation: let the cell run longer before you replay it.")
    return found


@dataclass(slots=True)
class _Run:
    world: int
    is_adaptive: bool
    costs: CostModel
    settings: PolicySettings
    space: LayoutSpace
    widths: tuple[int, ...] = ()
    here: Arrangement | None = None
    state: State = field(default_factory=State)
    switches: tuple[tuple[int, str, str], ...] = ()

    def step(self, observation: Observation, layout: str | None) -> Replayed:
        """Process one observation."""
        was = self._parse(observation.layout)
        if self.here is None:
            self.here = Arrangement(self._parse(layout) if layout else was)
        reason = ""
        if self.is_adaptive:
            own = msgspec.structs.replace(
                observation,
                layout=format_layout(self.here.layout, self.world),
                switches=self._recent(observation.time_ms),
                pinned_ms=0,
                reserved=tuple(int(rank) for rank in self.here.reserved),
                reserved_tiers=self.here.tiers,
            )
            verdict, self.state = decide(
                own, self.here.layout, self.space, self.costs, self.settings, self.state
            )
            if verdict.changes:
                reason = verdict.reason
                names = str(self.here.layout), str(verdict.choice.layout)
                if names[0] != names[1]:
                    self.switches = (*self.switches, (observation.time_ms, *names))
                self.here = verdict.choice
        reserved = tuple(rank for rank in was.ranks if rank in observation.reserved)
        there = Arrangement(was, reserved, observation.reserved_tiers if reserved else 0)
        met, asked = self._met(observation, there, was)
        own_met, _ = self._met(observation, self.here, was)
        return Replayed(
            observation.time_ms, there.name, self.here.name, met, own_met, asked, reason
        )

    def _met(
        self, observation: Observation, there: Arrangement, was: Layout
    ) -> tuple[float, float]:
        demands = demands_of(observation, self.settings)
        found = score(there, observation, demands, self.costs, self.settings, was)
        return (0.0 if found.refused else found.attainment), found.asked

    def _recent(self, now_ms: int) -> tuple[SwitchObservation, ...]:
        return tuple(
            SwitchObservation(now_ms - at, before, after, POLICY)
            for at, before, after in self.switches
            if now_ms - at < MINUTE_MS
        )

    def _parse(self, text: str) -> Layout:
        try:
            return parse_layout(text, self.world, self.widths)
        except ValueError as error:
            raise ReplayError(str(error)) from error


def summary(found: list[Replayed]) -> dict[str, float]:
    """Return the shares of requests that meet their goals, as logged and as replayed."""
    asked = sum(each.asked for each in found) or 1.0
    return {
        "observations": len(found),
        "changes": sum(bool(each.reason) for each in found),
        "met_as_logged": round(sum(each.was_met * each.asked for each in found) / asked, 4),
        "met_replayed": round(sum(each.now_met * each.asked for each in found) / asked, 4),
    }


def without_repeats(found: list[Replayed]) -> list[Replayed]:
    """Return only observations at which something changed, in the log or in the replay."""
    rows: list[Replayed] = []
    for each in found:
        if not rows or each.reason or (each.was, each.now) != (rows[-1].was, rows[-1].now):
            rows.append(replace(each))
    return rows

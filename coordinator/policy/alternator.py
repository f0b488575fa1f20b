"""Carries an alternation of batch work from decision to decision, and counts what it did.

Pure: the clock is that of the observations. `controller` calls this module.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from comm_pool.layout import Layout, format_layout
from coordinator.model.cost_model import CostModel
from coordinator.model.observation import Observation
from coordinator.policy.alternation import (
    Alternation,
    AlternationPhase,
    BatchLoad,
    advance,
    weigh,
)
from coordinator.policy.candidates import Arrangement
from coordinator.policy.decide import MINUTE_MS, POLICY, Verdict, standing
from coordinator.policy.predict import Demand
from coordinator.protocol.terms import Carry, Tier

SWITCHING = "switching"
"""Name of the time in which a switch of the alternation is under way."""

TIMED = (AlternationPhase.PREFILL.value, AlternationPhase.DECODE.value, SWITCHING)
"""What times are counted for."""


@dataclass(frozen=True, slots=True)
class AlternationView:
    """What an alternation is and did; times in seconds."""

    phase: AlternationPhase
    reason: str
    cycles: int
    seconds: Mapping[str, float]
    """By phase, and the time of the switches between them."""
    requests: int
    """Requests that ended meanwhile."""
    single_s: float
    """What these take in the best single layout, by the same predictions."""


class Alternator:
    """The alternation of one cell."""

    __slots__ = (
        "_counted_until_ms",
        "_cycles",
        "_now",
        "_reason",
        "_requests",
        "_seconds",
        "_single_s",
        "is_wanted",
    )

    def __init__(self) -> None:
        self.is_wanted = True
        """Whether the policy may alternate; one that is under way ends without it."""
        self._now = Alternation()
        self._counted_until_ms: int | None = None
        self._reason = "no batch work alone"
        self._cycles, self._requests, self._single_s = 0, 0, 0.0
        self._seconds = dict.fromkeys(TIMED, 0.0)

    @property
    def phase(self) -> AlternationPhase:
        """What the cell does for its batch tasks."""
        return self._now.phase

    @property
    def view(self) -> AlternationView:
        """What it is and did."""
        return AlternationView(
            self.phase,
            self._reason if self.is_wanted else "policy.alternation is off",
            self._cycles,
            {name: round(seconds, 3) for name, seconds in self._seconds.items()},
            self._requests,
            round(self._single_s, 3),
        )

    def on_end(self, tier: Tier) -> None:
        """Count a task that has ended."""
        if tier is Tier.BATCH and self.phase is not AlternationPhase.OFF and self._now.weighed:
            self._requests += 1
            self._single_s += self._now.weighed.single_s

    def look(
        self,
        observation: Observation,
        current: Layout,
        verdict: Verdict,
        costs: CostModel,
        switches_max: int,
        is_usable: Callable[[Layout], bool],
    ) -> Verdict:
        """Return the verdict, or that of the alternation in its place.

        `verdict` is the policy's for the `current` layout, with its candidates. Layouts that are
        not usable are left out; at most `switches_max` switches of the policy are made in a minute.
        """
        self._count(observation)
        before, now_ms = self._now, observation.time_ms
        if not self.is_wanted and before.phase is AlternationPhase.OFF:
            return verdict
        must_end = observation.pinned_ms > 0 or not self.is_wanted
        if observation.is_switching and not must_end:
            return verdict
        load = None
        if not must_end and (before.layout is None or is_usable(before.layout)):
            load = self._load(observation, current, verdict.demands, switches_max)
        weighed = None
        if load is not None and load.demand.unstarted >= 1:
            longest = max((tier.longest_tokens for tier in observation.tiers), default=0)
            layouts = dict.fromkeys(each.arrangement.layout for each in verdict.candidates)
            usable = [each for each in layouts if is_usable(each)]
            weighed = weigh(load.demand, usable, costs, longest, load.cycle_min_ms / 1000)
        self._now = now = advance(before, load, weighed, now_ms)
        self._cycles += now.phase is AlternationPhase.PREFILL and before.phase is not now.phase
        self._reason = _reason_of(now, load)
        if now.layout is not None:
            # Tasks are paused only in the layout in which they go on.
            is_home = now.weighed is not None and current == now.weighed.decode
            pauses = is_home and now.phase is AlternationPhase.PREFILL
            carry = Carry.PAUSE if pauses else Carry.RESHARD
            return self._verdict(verdict, observation, current, now.layout, carry)
        if before.phase is not AlternationPhase.PREFILL or before.weighed is None:
            return verdict
        # Urgent tasks decode at once in the layout for that.
        decode = before.weighed.decode
        if observation.pinned_ms or not is_usable(decode):
            return verdict
        return self._verdict(verdict, observation, current, decode, Carry.RESHARD)

    def _count(self, observation: Observation) -> None:
        before_ms, self._counted_until_ms = self._counted_until_ms, observation.time_ms
        if before_ms is not None and self.phase is not AlternationPhase.OFF:
            name = SWITCHING if observation.is_switching else self.phase.value
            self._seconds[name] += (observation.time_ms - before_ms) / 1000

    def _load(
        self,
        observation: Observation,
        current: Layout,
        demands: Collection[Demand],
        switches_max: int,
    ) -> BatchLoad | None:
        """Return the batch work, if there is no other."""
        if [each.tier for each in demands] != [Tier.BATCH]:
            return None
        (demand,) = demands
        total = sum(group.blocks_total for group in observation.groups)
        free = sum(group.blocks_free for group in observation.groups)
        made = sum(each.cause == POLICY for each in observation.switches)
        used = 1 - free / total if total else 0.0
        reads = any(tier.unstarted > tier.queued for tier in observation.tiers)
        return BatchLoad(
            demand,
            current,
            used,
            reads,
            may_switch=made + 2 <= switches_max,
            cycle_min_ms=2 * MINUTE_MS // switches_max,
        )

    def _verdict(
        self,
        verdict: Verdict,
        observation: Observation,
        current: Layout,
        layout: Layout,
        carry: Carry,
    ) -> Verdict:
        choice = Arrangement(layout)
        changes = choice != standing(observation, current)
        return replace(verdict, choice=choice, reason=self._reason, changes=changes, carry=carry)


def _reason_of(now: Alternation, load: BatchLoad | None) -> str:
    """Return why the cell alternates, or why not."""
    if load is None:
        return "not batch work alone"
    if now.weighed is None:
        if load.demand.unstarted < 1:
            return "no batch request waits"
        return "one layout is the best for prompts and for decodes"
    what = {
        AlternationPhase.OFF: "off",
        AlternationPhase.PREFILL: "prompts in " + format_layout(now.weighed.prefill),
        AlternationPhase.DECODE: "decodes in " + format_layout(now.weighed.decode),
    }[now.phase]
    return f"{what}: {now.weighed}"

"""Alternation of batch work between a layout that reads prompts and one that decodes. Pure.

While only the batch tier has tasks, a cell may read prompts in the layout that is fastest at that
until its KV is full, and then decode in another one until there is room for many more (Seesaw,
section 4.2: transition-minimising scheduling). Tasks that decode are paused while prompts are read,
and new ones wait in the queue while others decode. `weigh` tells what that is worth after its
switches: it compares all pairs of layouts with all layouts that do both at once. `controller`
calls this module.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from comm_pool.layout import Layout, format_layout
from coordinator.model.cost_model import CostModel, GroupCost
from coordinator.policy.predict import Demand
from coordinator.tasks.placement import BATCH_RESERVE_DIVISOR

SHARES = (0.25, 0.5, 0.75, 0.95)
"""The shares of its tasks that a cell may replace in a cycle; the best one is taken."""

FULL = 0.95
"""A cell is full with this share of the tasks that it can hold, or of its KV."""

GAIN_MIN = 0.05
"""Least relative gain in requests per second: predictions err by about as much."""

PHASE_MIN_MS = 1_000
"""Least time of a phase of prompts: reports of the KV in use are older than the phase at first."""

CYCLES_MAX = 3.0
"""Most time of a phase, in predicted cycles: then the work is another by now."""

BATCH_PLACES = 1 - 1 / BATCH_RESERVE_DIVISOR
"""The share of a group's places that batch tasks may have."""

Known = tuple[Layout, list[GroupCost]]


class AlternationPhase(StrEnum):
    """What a cell does for its batch tasks; exactly one at a time."""

    OFF = "off"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Weighed:
    """The best pair of layouts, and the best single one; times are the cell's, per request."""

    prefill: Layout
    decode: Layout
    single: Layout
    share: float
    """The share of its tasks that the cell replaces in a cycle."""
    tasks_max: float
    """The tasks that both layouts of the pair can hold."""
    pair_s: float
    """Seconds with the pair, including a request's share of the switches."""
    single_s: float
    """Seconds if one layout does it all."""

    @property
    def cycle_s(self) -> float:
        """How long a cycle takes, in seconds."""
        return max(1.0, self.share * self.tasks_max) * self.pair_s

    @property
    def gain(self) -> float:
        """By what share the pair does more requests in the same time."""
        return self.single_s / self.pair_s - 1

    def __str__(self) -> str:
        """Return the comparison in words."""
        pair = f"{format_layout(self.prefill)} and {format_layout(self.decode)}"
        return (
            f"a request takes {self.pair_s * 1e3:.0f} ms of the cell in turns between {pair}, and "
            f"{self.single_s * 1e3:.0f} ms in {format_layout(self.single)} alone"
        )


def weigh(
    demand: Demand,
    layouts: Iterable[Layout],
    costs: CostModel,
    longest_tokens: int = 0,
    cycle_min_s: float = 0.0,
) -> Weighed | None:
    """Compare pairs of layouts with single ones for batch requests of this demand.

    A cycle of two switches takes at least `cycle_min_s`. None if one layout is the best for prompts
    and for decodes, or if fewer than two were measured and hold a task of `longest_tokens` tokens.
    """
    known = [
        (layout, found)
        for layout in layouts
        if (found := _costs_of(layout, costs))
        and max(each.capacity_tokens for each in found) >= longest_tokens
    ]
    if len(known) < 2:
        return None
    context = demand.prompt + demand.output / 2
    single, single_s = _least(known, lambda cost: _single_s(cost, demand, context))
    prefill, prefill_s = _least(known, lambda cost: _prefill_s(cost, demand.prompt))
    best: Weighed | None = None
    for share in SHARES:
        decode, decode_s = _least(known, _decoding(demand.output, context, 1 - share / 2))
        if decode[0] == prefill[0]:
            continue
        tasks_max = min(_tasks_max(each[1], context) for each in (prefill, decode))
        count = max(1.0, min(share * tasks_max, demand.unstarted))
        switches_s = costs.switch.pause_s + costs.switch.seconds(count * demand.prompt)
        pair_s = max(prefill_s + decode_s + switches_s / count, cycle_min_s / count)
        if best is None or pair_s < best.pair_s:
            best = Weighed(prefill[0], decode[0], single[0], share, tasks_max, pair_s, single_s)
    return best


def _costs_of(layout: Layout, costs: CostModel) -> list[GroupCost]:
    """Return the cost of each group; empty if one of them was not measured."""
    found = [costs.groups.get(group.name) for group in layout.groups]
    return [each for each in found if each is not None] if None not in found else []


def _least(known: Sequence[Known], seconds: Callable[[GroupCost], float]) -> tuple[Known, float]:
    """Return the layout whose groups together need the least time per request, and that time."""
    times = [1 / sum(1 / seconds(cost) for cost in costs) for _, costs in known]
    at = min(range(len(known)), key=times.__getitem__)
    return known[at], times[at]


def _tasks_max(costs: Iterable[GroupCost], context: float) -> float:
    """Return how many batch tasks of this mean context these groups hold."""
    return sum(
        max(1.0, min(each.tasks_max * BATCH_PLACES, each.capacity_tokens / max(1.0, context)))
        for each in costs
    )


def _prefill_s(cost: GroupCost, prompt: float) -> float:
    """Return a group's seconds per prompt in steps that are full of prompts."""
    return cost.step_s(cost.chunk_tokens, 0.0) * prompt / cost.chunk_tokens


def _decoding(output: float, context: float, share: float) -> Callable[[GroupCost], float]:
    """Return a group's seconds per request of steps that only decode.

    On average, this share of the tasks that it can hold are left: none come in while others end.
    """

    def seconds(cost: GroupCost) -> float:
        tasks = max(1.0, share * _tasks_max([cost], context))
        return cost.step_s(tasks, tasks * context) * output / tasks

    return seconds


def _single_s(cost: GroupCost, demand: Demand, context: float) -> float:
    """Return a group's seconds per request where each step decodes for all and reads prompts."""
    tasks = _tasks_max([cost], context)
    output = max(1.0, demand.output)
    prompts = demand.prompt * tasks / output
    if prompts > cost.chunk_tokens:
        # Prompts fill the step before that many tasks run.
        tasks, prompts = cost.chunk_tokens * output / demand.prompt, float(cost.chunk_tokens)
    return cost.step_s(tasks + prompts, tasks * context) * output / tasks


@dataclass(frozen=True, slots=True)
class Alternation:
    """Where a cell is in it, since when, and by what comparison."""

    phase: AlternationPhase = AlternationPhase.OFF
    since_ms: int = 0
    cycle_ms: int | None = None
    """When the last phase of prompts began."""
    weighed: Weighed | None = None

    @property
    def layout(self) -> Layout | None:
        """The layout of the phase; None leaves it to the rest of the policy."""
        if self.weighed is None or self.phase is AlternationPhase.OFF:
            return None
        is_prefill = self.phase is AlternationPhase.PREFILL
        return self.weighed.prefill if is_prefill else self.weighed.decode


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The batch work of a cell in which no other tier has tasks."""

    demand: Demand
    layout: Layout
    """The layout that serves."""
    used: float
    """The share of its KV that tasks use."""
    reads: bool
    """Whether groups read prompts; if none does while tasks wait, none of these fits."""
    may_switch: bool = True
    """Whether the policy may make two more switches in this minute."""
    cycle_min_ms: int = 0
    """Least time from one phase of prompts to the next."""


def advance(
    now: Alternation, load: BatchLoad | None, weighed: Weighed | None, now_ms: int
) -> Alternation:
    """Return what comes next; call it at each decision while no switch is under way.

    Without a `load` the alternation ends at once: more urgent tiers have tasks, an operator chose
    the layout, or ranks are lost.
    """
    off = Alternation(AlternationPhase.OFF, now_ms, now.cycle_ms, weighed)
    if load is None or load.demand.unstarted < 1:
        # What a phase of prompts has read is decoded as ever.
        has_prompts = load is not None and now.phase is AlternationPhase.PREFILL
        return _begin(now, AlternationPhase.DECODE, now_ms) if has_prompts else off
    if now.phase is AlternationPhase.PREFILL:
        is_full = now_ms - now.since_ms >= PHASE_MIN_MS and _is_full(load, now.weighed)
        is_over = is_full or _is_overdue(now, now_ms)
        return _begin(now, AlternationPhase.DECODE, now_ms) if is_over else now
    may_begin = load.may_switch and _is_due(now, load, now_ms)
    if now.phase is AlternationPhase.DECODE:
        if _is_overdue(now, now_ms):
            return off
        if not _has_room(load, now.weighed) or not (may_begin or load.demand.running < 1):
            return now
        if weighed is None or now.weighed is None or weighed.decode != now.weighed.decode:
            return off
    if weighed is None or weighed.gain < GAIN_MIN or not may_begin:
        return off
    # Tasks may be paused only in the layout in which they go on.
    can_pause = not load.demand.running or load.layout == weighed.decode
    is_prefill = can_pause and _has_room(load, weighed)
    phase = AlternationPhase.PREFILL if is_prefill else AlternationPhase.DECODE
    return _begin(replace(off, weighed=weighed), phase, now_ms)


def _begin(now: Alternation, phase: AlternationPhase, now_ms: int) -> Alternation:
    cycle_ms = now_ms if phase is AlternationPhase.PREFILL else now.cycle_ms
    return replace(now, phase=phase, since_ms=now_ms, cycle_ms=cycle_ms)


def _is_due(now: Alternation, load: BatchLoad, now_ms: int) -> bool:
    return now.cycle_ms is None or now_ms - now.cycle_ms >= load.cycle_min_ms


def _is_overdue(now: Alternation, now_ms: int) -> bool:
    cycle_s = now.weighed.cycle_s if now.weighed is not None else 0.0
    return now_ms - now.since_ms >= 1000 * CYCLES_MAX * cycle_s


def _is_full(load: BatchLoad, weighed: Weighed | None) -> bool:
    """Return whether the cell holds as many tasks as it can, running or paused."""
    tasks_max = weighed.tasks_max if weighed is not None else 0.0
    is_full = load.demand.running >= FULL * tasks_max or load.used >= FULL
    return is_full or not load.reads


def _has_room(load: BatchLoad, weighed: Weighed | None) -> bool:
    """Return whether as many tasks have ended as a cycle replaces, and prompts find KV."""
    if weighed is None:
        return False
    # Tasks that are about to end are longer than others.
    has_kv = load.demand.running < 1 or 1 - load.used >= weighed.share / 2
    return has_kv and load.demand.running <= (1 - weighed.share) * weighed.tasks_max

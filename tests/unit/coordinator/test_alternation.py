"""Alternation of batch work: when it is worth it, what follows what, and what it says."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_pool.layout import Layout, parse_layout
from coordinator.model.cost_model import CostModel, GroupCost, SwitchCost
from coordinator.model.observation import GroupObservation, Observation, TierObservation
from coordinator.model.policy_settings import TierGoal
from coordinator.model.step_line import StepLine
from coordinator.policy.alternation import (
    CYCLES_MAX,
    FULL,
    GAIN_MIN,
    PHASE_MIN_MS,
    Alternation,
    AlternationPhase,
    BatchLoad,
    Weighed,
    advance,
    weigh,
)
from coordinator.policy.alternator import SWITCHING, Alternator
from coordinator.policy.candidates import Arrangement
from coordinator.policy.decide import ScoredCandidate, Verdict, standing
from coordinator.policy.demand import demands_of
from coordinator.policy.predict import Demand
from coordinator.policy.score import Score
from coordinator.protocol.terms import Carry, Tier
from tests.harness.coordinator.policy import SETTINGS, observation, tier

OFF, PREFILL, DECODE = AlternationPhase
CYCLE_MIN_MS = 5_000
WIDTHS = (1, 2, 4)
TP, PP, DP = (parse_layout(name, 4, WIDTHS) for name in ("tp4", "pp4", "dp4"))
LAYOUTS = (TP, PP)


def cost(base_s: float, token_s: float, stages: int = 1) -> GroupCost:
    line = StepLine(base_s, token_s, 5e-9)
    return GroupCost(line, line, 400_000, 256, stages * 2_048, stages=stages)


SLOW = CostModel(
    {"tp4": cost(0.080, 3e-4), "pp4": cost(0.302, 1e-4, 4)}, SwitchCost(0.1, 160_000, 10e9)
)
"""Slow memory and a slow link: tp decodes faster, stages read prompts faster."""


def demand(prompt: int = 3_000, output: float = 256.0, **more: Any) -> Demand:
    waiting = {"unstarted": 400.0, "unstarted_tokens": 400.0 * prompt}
    return Demand(Tier.BATCH, TierGoal(), 0.0, (prompt,), output, **{**waiting, **more})


def weighed(given: Demand | None = None, costs: CostModel = SLOW, **more: Any) -> Weighed:
    found = weigh(given or demand(), LAYOUTS, costs, **more)
    assert found is not None
    return found


def test_it_is_worth_it_where_one_layout_reads_and_another_decodes_much_faster() -> None:
    found = weighed()
    assert (found.prefill, found.decode) == (PP, TP)
    assert found.gain > 0.2
    assert "in turns between pp4 and tp4" in str(found)


@pytest.mark.parametrize(("prompt", "output", "single"), [(100, 1_000.0, TP), (30_000, 20.0, PP)])
def test_it_is_not_where_nearly_all_is_of_one_kind(
    prompt: int, output: float, single: Layout
) -> None:
    found = weigh(demand(prompt, output), LAYOUTS, SLOW)
    assert found is None or (found.gain < GAIN_MIN and found.single == single)


def test_one_layout_that_is_the_best_for_both_is_not_left() -> None:
    better = replace(SLOW, groups={**SLOW.groups, "dp1": cost(0.02, 2e-4)})
    assert weigh(demand(), (*LAYOUTS, DP), better) is None
    assert weigh(demand(), (TP,), SLOW) is None
    assert weigh(demand(), (TP, DP), SLOW) is None, "dp was not measured"


def test_a_layout_that_does_not_hold_the_longest_task_is_left_out() -> None:
    small = replace(SLOW.groups["pp4"], capacity_tokens=50_000)
    costs = replace(SLOW, groups={**SLOW.groups, "pp4": small})
    assert weighed(costs=costs, longest_tokens=40_000).prefill == PP
    assert weigh(demand(), LAYOUTS, costs, longest_tokens=60_000) is None


def test_switches_that_take_long_are_not_worth_it() -> None:
    slow = replace(SLOW, switch=SwitchCost(20.0, 160_000, 10e9))
    assert weighed(costs=slow).gain < weighed().gain
    assert weighed(costs=slow).share >= weighed().share, "longer cycles, as switches cost more"
    assert weighed(demand(unstarted=4.0), slow).gain < GAIN_MIN, "a few do not pay for two switches"


def test_cycles_are_long_enough_for_the_switches_that_are_allowed() -> None:
    short = weighed()
    cycle_s = short.share * short.tasks_max * short.pair_s
    longer = weighed(cycle_min_s=2 * cycle_s)
    assert longer.share > short.share
    assert longer.pair_s >= short.pair_s
    assert weighed(cycle_min_s=100 * cycle_s).gain < 0


# ---------------------------------------------------------------------- phases


def load(
    layout: Layout = TP, used: float = 0.3, *, reads: bool = True, may: bool = True, **more: Any
) -> BatchLoad:
    return BatchLoad(demand(**more), layout, used, reads, may, CYCLE_MIN_MS)


def at(phase: AlternationPhase, since_ms: int = 0, cycle_ms: int | None = 0) -> Alternation:
    return Alternation(phase, since_ms, cycle_ms, weighed())


LATE_MS = 60_000
FEW, MANY = 10.0, 120.0


def test_it_begins_with_prompts_where_there_is_room() -> None:
    found = advance(Alternation(), load(running=FEW), weighed(), LATE_MS)
    assert (found.phase, found.layout, found.cycle_ms) == (PREFILL, PP, LATE_MS)


def test_it_begins_with_decodes_where_there_is_none() -> None:
    found = advance(Alternation(), load(running=MANY), weighed(), LATE_MS)
    assert (found.phase, found.layout) == (DECODE, TP)


def test_tasks_are_paused_only_in_the_layout_in_which_they_go_on() -> None:
    assert advance(Alternation(), load(PP, running=FEW), weighed(), LATE_MS).phase is DECODE
    assert advance(Alternation(), load(PP, running=0.0), weighed(), LATE_MS).phase is PREFILL


@pytest.mark.parametrize(
    ("given", "passed_ms", "phase"),
    [
        (load(PP, running=FEW), LATE_MS, PREFILL),
        (load(PP, running=MANY + 8), LATE_MS, DECODE),
        (load(PP, used=FULL, running=FEW), LATE_MS, DECODE),
        (load(PP, used=FULL, running=FEW), PHASE_MIN_MS - 1, PREFILL),
        (load(PP, running=FEW, reads=False), LATE_MS, DECODE),
        (load(PP, running=FEW, reads=False), PHASE_MIN_MS - 1, PREFILL),
        (load(PP, running=FEW, unstarted=0.0), 1, DECODE),
    ],
)
def test_prompts_are_read_until_the_cell_is_full_or_none_waits(
    given: BatchLoad, passed_ms: int, phase: AlternationPhase
) -> None:
    found = advance(at(PREFILL), given, weighed(), passed_ms)
    assert found.phase is phase
    assert found.layout == (PP if phase is PREFILL else TP)


@pytest.mark.parametrize(
    ("given", "passed_ms", "phase"),
    [
        (load(running=MANY), LATE_MS, DECODE),
        (load(running=90.0), LATE_MS, PREFILL),
        (load(running=90.0), CYCLE_MIN_MS - 1, DECODE),
        (load(running=90.0, may=False), LATE_MS, DECODE),
        (load(running=0.0), CYCLE_MIN_MS - 1, OFF),
        (load(running=0.0, may=False), LATE_MS, OFF),
        (load(running=MANY, unstarted=0.0), 1, OFF),
    ],
)
def test_decodes_go_on_until_a_cycle_of_tasks_has_ended(
    given: BatchLoad, passed_ms: int, phase: AlternationPhase
) -> None:
    assert advance(at(DECODE), given, weighed(), passed_ms).phase is phase


def test_it_ends_where_it_is_not_worth_it_any_more() -> None:
    worse = replace(weighed(), single_s=weighed().pair_s)
    assert advance(at(DECODE), load(running=FEW), worse, LATE_MS).phase is OFF
    other = replace(weighed(), decode=DP)
    assert advance(at(DECODE), load(running=FEW), other, LATE_MS).phase is OFF
    assert advance(at(DECODE), load(running=FEW), None, LATE_MS).phase is OFF


@pytest.mark.parametrize(
    ("phase", "given", "then"),
    [
        # Answers became so short that requests end as fast as they are read.
        (PREFILL, load(PP, 0.6, running=30.0, output=8.0), DECODE),
        # A few answers became so long that the others wait for them.
        (DECODE, load(used=0.05, running=MANY), OFF),
    ],
)
def test_no_phase_lasts_for_ever(
    phase: AlternationPhase, given: BatchLoad, then: AlternationPhase
) -> None:
    now, until_ms = at(phase), int(CYCLES_MAX * weighed().cycle_s * 1000)
    assert advance(now, given, weighed(), until_ms - 1).phase is phase
    assert advance(now, given, weighed(), until_ms + 1).phase is then


def test_a_few_long_tasks_that_fill_the_kv_leave_no_room_for_prompts() -> None:
    full = load(used=0.97, reads=False, running=65.0)
    assert advance(at(DECODE), full, weighed(), CYCLE_MIN_MS).phase is DECODE


@pytest.mark.parametrize("phase", list(AlternationPhase))
def test_it_ends_at_once_if_there_is_more_than_batch_work(phase: AlternationPhase) -> None:
    found = advance(at(phase), None, weighed(), 1)
    assert (found.phase, found.layout) == (OFF, None)


events = st.lists(
    st.tuples(
        st.sampled_from([None, TP, PP]),
        st.floats(0, 1),
        st.floats(0, 200),
        st.floats(0, 400),
        st.booleans(),
        st.integers(1, 3_000),
    ),
    max_size=60,
)


@given(events)
def test_no_task_is_ever_paused_where_it_cannot_go_on(
    seen: list[tuple[Layout | None, float, float, float, bool, int]],
) -> None:
    now, now_ms, cycles = Alternation(), 0, []
    for layout, used, running, unstarted, may, passed_ms in seen:
        now_ms += passed_ms
        given = None
        if layout is not None:
            serving = now.layout or layout
            given = load(serving, used, may=may, running=running, unstarted=unstarted)
        before, now = now, advance(now, given, weighed(), now_ms)
        if now.phase is PREFILL and before.phase is not PREFILL:
            assert given is not None
            assert not running or given.layout == TP
            cycles.append(now_ms)
        if given is None:
            assert now.phase is OFF
    assert all(later - earlier >= CYCLE_MIN_MS for earlier, later in pairwise(cycles))


# ---------------------------------------------------------------------- verdicts


CANDIDATES = tuple(
    ScoredCandidate(Arrangement(each), Score(0.0, 0.0, 1.0, 0.0), 0.0, 0.0) for each in LAYOUTS
)


class Cell:
    """Looks at observations as the policy's controller does."""

    def __init__(self) -> None:
        self.alternator, self.layout, self.now_ms = Alternator(), TP, 0

    def look(self, *tiers: TierObservation, passed_ms: int = LATE_MS, **more: Any) -> Verdict:
        self.now_ms += passed_ms
        seen = observation(str(self.layout), *tiers)
        group = GroupObservation(self.layout.groups[0].name, 0, blocks_free=70, blocks_total=100)
        seen = _changed(seen, time_ms=self.now_ms, groups=(group,), **more)
        demands = tuple(demands_of(seen, SETTINGS))
        here = standing(seen, self.layout)
        own = Verdict(here, "own", changes=False, candidates=CANDIDATES, demands=demands)
        found = self.alternator.look(seen, self.layout, own, SLOW, 12, self.usable.__contains__)
        self.layout = found.choice.layout
        return found

    usable: tuple[Layout, ...] = LAYOUTS


def _changed(seen: Observation, **more: Any) -> Observation:
    fields = {name: getattr(seen, name) for name in seen.__struct_fields__}
    return Observation(**{**fields, **more})


def batch(running: int, unstarted: int = 400) -> TierObservation:
    return tier(
        Tier.BATCH,
        unstarted=unstarted,
        unstarted_tokens=unstarted * 3_000,
        running=running,
        context_tokens=running * 3_100,
        prompts=(3_000,),
        output_tokens=256.0,
    )


def test_a_cycle_pauses_what_runs_and_moves_what_was_read() -> None:
    cell = Cell()
    found = cell.look(batch(20))
    assert (found.choice.layout, found.carry, found.changes) == (PP, Carry.PAUSE, True)
    assert not cell.look(batch(60)).changes
    found = cell.look(batch(127))
    assert (found.choice.layout, found.carry, found.changes) == (TP, Carry.RESHARD, True)
    assert "decodes in tp4" in found.reason
    cell.look(batch(90))
    view = cell.alternator.view
    assert view.cycles == 2
    late_s = LATE_MS / 1000
    assert view.seconds == {"prefill": 2 * late_s, "decode": late_s, SWITCHING: 0.0}


def test_an_urgent_request_among_prompts_goes_at_once_to_the_layout_for_decodes() -> None:
    cell = Cell()
    cell.look(batch(20))
    found = cell.look(tier(Tier.INTERACTIVE, unstarted=1, unstarted_tokens=100), batch(30))
    assert (found.choice.layout, found.carry, found.changes) == (TP, Carry.RESHARD, True)
    assert cell.alternator.phase is OFF
    assert cell.look(tier(Tier.INTERACTIVE, running=1), batch(30)).reason == "own"


def test_an_operators_layout_and_a_lost_layout_end_it() -> None:
    cell = Cell()
    cell.look(batch(20))
    assert cell.look(batch(30), pinned_ms=5_000).reason == "own"
    cell = Cell()
    cell.look(batch(20))
    cell.usable = (TP,)
    assert cell.look(batch(30)).choice.layout == TP
    assert cell.alternator.phase is OFF


def test_the_time_of_its_switches_and_what_one_layout_would_take_are_counted() -> None:
    cell = Cell()
    cell.look(batch(20))
    cell.look(batch(20), passed_ms=200, is_switching=True)
    cell.alternator.on_end(Tier.BATCH)
    cell.alternator.on_end(Tier.STANDARD)
    view = cell.alternator.view
    assert view.seconds == {"prefill": 0.0, "decode": 0.0, SWITCHING: 0.2}
    assert view.requests == 1
    assert view.single_s == pytest.approx(weighed().single_s, rel=0.1)
    assert view.reason.startswith("prompts in pp4")


def test_it_says_why_it_does_not_alternate() -> None:
    cell = Cell()
    assert cell.alternator.view.reason == "no batch work alone"
    cell.look(tier(Tier.STANDARD, running=3))
    assert cell.alternator.view.reason == "not batch work alone"
    cell.look(batch(3, unstarted=0))
    assert cell.alternator.view.reason == "no batch request waits"

"""Simulated batch work on drawn devices: alternation wins, or is refused where it would lose.

The decisions are the product's; groups are modelled by the step times that the policy has.
"""

import random
from dataclasses import dataclass, replace

import pytest

from comm_pool.layout import Mode, parse_layout
from comm_pool.mixed import Staged
from coordinator.model.cost_model import CostModel, GroupCost, SwitchCost
from coordinator.model.policy_settings import PolicySettings, TierGoal
from coordinator.model.step_line import StepLine
from coordinator.policy.alternation import GAIN_MIN, weigh
from coordinator.policy.candidates import LayoutSpace
from coordinator.policy.predict import Demand
from coordinator.protocol.terms import Tier
from tools.simulator.cell import Arrival, SimCell

RANKS = 4
WIDTHS = (1, 2, 4)
CHUNK_TOKENS = 2_048
TASKS_MAX = 256
FIRST, REQUESTS = 8, 400
"""The first ones tell the policy how long answers are."""
LIMIT_S = 20_000
TAIL_S = 8.0
"""What the ends of both runs may differ by: a switch and a few steps."""
SETTINGS = PolicySettings()


@dataclass(frozen=True)
class Box:
    """Four devices that hold the model only together, and what requests of a load look like."""

    costs: CostModel
    prompt: int
    output: int


def drawn(seed: int) -> Box:
    draw = random.Random(seed)
    read_s, token_s = draw.uniform(0.04, 0.4) / RANKS, draw.uniform(3e-5, 4e-4)
    sum_s, context_s = token_s * draw.uniform(0, 0.6), 2e-8 / RANKS
    tp = StepLine(read_s + 0.005, token_s / RANKS + sum_s, context_s)
    pp = StepLine(RANKS * (read_s + 0.0005), token_s / RANKS, context_s)
    room = int(draw.uniform(1e5, 6e5))
    groups = {
        "tp4": GroupCost(tp, tp, room, TASKS_MAX, CHUNK_TOKENS),
        "pp4": GroupCost(pp, pp, room, TASKS_MAX, RANKS * CHUNK_TOKENS, stages=RANKS),
    }
    lengths = draw.choice((300, 1_000, 3_000, 6_000)), draw.choice((50, 150, 256, 1_000))
    return Box(CostModel(groups, SwitchCost(0.1, 160_000, 10e9)), *lengths)


def space() -> LayoutSpace:
    return LayoutSpace(RANKS, {RANKS: Mode.TP}, pipelines=(Staged(RANKS),))


def run(box: Box, layout: str, settings: PolicySettings | None = None) -> tuple[float, SimCell]:
    """Return how long a batch takes, in one layout or with a policy that has these settings."""
    chosen = space() if settings is not None else None
    cell = SimCell(parse_layout(layout, RANKS, WIDTHS), box.costs, settings or SETTINGS, chosen)
    begun_s = end_s = 0.0
    for count in (FIRST, REQUESTS):
        begun_s = end_s
        for _ in range(count):
            cell.offer(Arrival(begun_s, Tier.BATCH, box.prompt, box.output))
        while len(cell.result.requests) < count + (count == REQUESTS) * FIRST:
            end_s += 1.0
            assert end_s < LIMIT_S, "the batch does not end"
            cell.advance(end_s)
    last_s = max(each.end_s or LIMIT_S for each in cell.result.requests)
    return last_s - begun_s, cell


@pytest.mark.parametrize("seed", [1, 5, 17, 18, 19, 27, 36])
def test_it_wins_or_stays_off(seed: int) -> None:
    box = drawn(seed)
    best_s = min(run(box, name)[0] for name in ("tp4", "pp4"))
    took_s, cell = run(box, "tp4", SETTINGS)
    assert took_s < 1.03 * best_s + TAIL_S
    demand = Demand(
        Tier.BATCH, TierGoal(), 0.0, (box.prompt,), box.output, unstarted=REQUESTS,
        unstarted_tokens=REQUESTS * box.prompt,
    )  # fmt: skip
    layouts = space().layouts(parse_layout("tp4", RANKS, WIDTHS))
    weighed = weigh(demand, layouts, box.costs)
    view = cell.alternation
    assert weighed is not None
    assert view is not None
    if weighed.gain > 2 * GAIN_MIN:
        assert view.cycles > 2
        assert best_s / took_s - 1 > weighed.gain / 2, "the prediction is about right"
    elif weighed.gain < 0:
        assert view.cycles <= 1, "none but before the length of answers is known"


def test_what_it_says_of_one_layout_is_about_what_one_takes() -> None:
    box = drawn(1)
    best_s = min(run(box, name)[0] for name in ("tp4", "pp4"))
    _, cell = run(box, "tp4", SETTINGS)
    view = cell.alternation
    assert view is not None
    assert view.single_s / view.requests == pytest.approx(best_s / REQUESTS, rel=0.25)
    assert sum(view.seconds.values()) < view.single_s


def urgent_s(box: Box, settings: PolicySettings) -> tuple[float, int]:
    """Return the longest time to a first token of urgent requests in a batch, and the cycles."""
    cell = SimCell(parse_layout("tp4", RANKS, WIDTHS), box.costs, settings, space())
    for _ in range(REQUESTS):
        cell.offer(Arrival(0.0, Tier.BATCH, box.prompt, box.output))
    for number in range(4):
        cell.offer(Arrival(30.0 + 60.0 * number, Tier.INTERACTIVE, 100, 20))
    end_s = 0.0
    while len(cell.result.requests) < REQUESTS + 4:
        end_s += 1.0
        assert end_s < LIMIT_S
        cell.advance(end_s)
    urgent = [each for each in cell.result.requests if each.tier is Tier.INTERACTIVE]
    view = cell.alternation
    return max(each.ttft_s or LIMIT_S for each in urgent), view.cycles if view is not None else 0


@pytest.mark.parametrize("seed", [1, 19, 27])
def test_urgent_requests_among_a_batch_wait_for_a_switch_at_most(seed: int) -> None:
    """Batch tasks make room for them, in any case."""
    box = drawn(seed)
    switch_s = box.costs.switch.seconds(box.costs.groups["tp4"].capacity_tokens)
    took_s, cycles = urgent_s(box, SETTINGS)
    without_s, _ = urgent_s(box, replace(SETTINGS, alternates=False))
    assert cycles >= 2, "it goes on after each of them"
    assert took_s < without_s + switch_s
    assert without_s < 4.0


def test_a_cell_that_may_not_alternate_takes_longer() -> None:
    box = drawn(1)
    took_s, _ = run(box, "tp4", SETTINGS)
    without_s, cell = run(box, "tp4", replace(SETTINGS, alternates=False))
    assert cell.alternation is None
    assert without_s > 1.15 * took_s

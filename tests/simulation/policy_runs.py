"""Runs of the policy against fixed layouts over random loads; by hand for as many as wanted.

python -m tests.simulation.policy_runs 200 prints what the policy makes of 200 shapes, and
`policy_runs 200 400` what it makes of the next 200.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from comm_pool.layout import Mode, parse_layout
from coordinator.model.cost_model import CostModel
from coordinator.model.policy_settings import PolicySettings
from coordinator.policy.candidates import LayoutSpace
from tests.simulation.policy_shapes import (
    LLAMA_70B_FP8,
    QWEN_32B,
    Phase,
    any_shape,
    arrivals,
    bursty,
    mixed,
)
from tools.simulator.cell import Arrival, Run, SimCell, is_good

WIDTHS = (1, 2, 4)
FIXED = ("dp4", "tp2+tp2", "tp4")
GRACE_S = 25.0
"""How long after its last phase a run goes on, so that long outputs can end."""

SETTINGS = PolicySettings()


@dataclass(frozen=True)
class Compared:
    """One load: requests that met their goals, by fixed layout and with the policy.

    `worth` and `fixed_worth` count them with the weights of their tiers.
    """

    seed: int
    asked: int
    fixed: dict[str, int]
    adaptive: int
    run: Run
    fixed_worth: dict[str, float]
    worth: float

    @property
    def ratio(self) -> float:
        """The policy's goodput in parts of the best fixed layout's."""
        return self.adaptive / max(1, *self.fixed.values())


def simulate(load: Sequence[Arrival], until_s: float, costs: CostModel, layout: str | None) -> Run:
    """Run a load in a fixed layout, or with the policy if none is given."""
    space = LayoutSpace(4, {1: Mode.DP, 2: Mode.TP, 4: Mode.TP}) if layout is None else None
    cell = SimCell(parse_layout(layout or "dp4", 4, WIDTHS), costs, SETTINGS, space)
    return cell.run(load, until_s)


def compare(phases: Sequence[Phase], seed: int, costs: CostModel) -> Compared:
    """Run one load in every fixed layout and with the policy."""
    load = arrivals(phases, seed)
    until_s = sum(phase.seconds for phase in phases) + GRACE_S
    runs = {name: simulate(load, until_s, costs, name) for name in FIXED}
    fixed = {name: good(each) for name, each in runs.items()}
    worth = {name: each.goodput(SETTINGS) for name, each in runs.items()}
    run = simulate(load, until_s, costs, None)
    return Compared(seed, len(load), fixed, good(run), run, worth, run.goodput(SETTINGS))


def good(run: Run) -> int:
    """Return how many requests were complete within their goals."""
    return sum(is_good(each, SETTINGS) for each in run.requests)


def box_of(seed: int) -> CostModel:
    """Return one of the two boxes."""
    return QWEN_32B if seed % 2 else LLAMA_70B_FP8


def returns_within(run: Run, stay_s: float) -> int:
    """Return how often a layout was left for another and was there again within `stay_s`."""
    layouts = [(at_s, name.split(",")[0]) for at_s, name, _ in run.switches]
    return sum(
        first[1] == third[1] and third[0] - second[0] < stay_s
        for first, second, third in zip(layouts, layouts[1:], layouts[2:], strict=False)
    )


def main() -> None:
    """Print the policy's goodput beside that of fixed layouts."""
    seeds = range(*map(int, sys.argv[1:]))
    found = [compare(any_shape(seed), seed, box_of(seed)) for seed in seeds]
    print("requests", sum(each.asked for each in found))
    for name in FIXED:
        print(f"{name:8s} good {sum(each.fixed[name] for each in found)}")
    print(f"adaptive good {sum(each.adaptive for each in found)}")
    best = sum(max(each.fixed_worth.values()) for each in found)
    shares = [max(1.0, each.worth) / max(1.0, *each.fixed_worth.values()) for each in found]
    print(
        f"worth {sum(each.worth for each in found):.0f}, of the best fixed layout of each load "
        f"{best:.0f}; mean ratio {sum(shares) / len(shares):.3f}, below 0.97 in "
        f"{sum(each < 0.97 for each in shares)}, below 0.9 in {sum(each < 0.9 for each in shares)}"
    )
    below = sorted((each for each in found if each.ratio < 0.97), key=lambda each: each.ratio)
    ratios = sorted(each.ratio for each in found)
    print(f"ratio to the best fixed layout of each load: median {ratios[len(ratios) // 2]:.3f}")
    above = sum(ratio > 1.2 for ratio in ratios)
    print(f"below 0.97 in {len(below)} of {len(seeds)}, above 1.2 in {above}")
    for each in below:
        print(
            f"  seed {each.seed}: {each.ratio:.3f}, {each.adaptive} of {each.asked}, {each.fixed}"
        )
    print("returns within the stay:", sum(returns_within(each.run, 3.0) for each in found))
    for name, preset in (("bursty", bursty), ("mixed", mixed)):
        for seed in range(4):
            each = compare(preset(random.Random(seed)), seed, box_of(seed))
            print(f"{name} {seed}: {each.ratio:.3f}, {each.adaptive} of {each.asked}, {each.fixed}")


if __name__ == "__main__":
    main()

"""What a sequence of layouts that knows the load could reach; by hand, a bound for the policy.

python -m tests.simulation.policy_oracle tells of each load of the presets how many requests came,
which is what no sequence can exceed, how many the best fixed layout serves within their goals, and
how many a sequence does that was searched for: from the best fixed layout on, each window of 4 s is
given every other layout as long as that makes more requests good.
"""

import random
from collections.abc import Sequence

from comm_pool.layout import Mode, parse_layout
from coordinator.model.cost_model import CostModel
from coordinator.policy.candidates import Arrangement, LayoutSpace
from tests.simulation.planned_cell import PlannedCell
from tests.simulation.policy_runs import FIXED, GRACE_S, SETTINGS, WIDTHS, box_of, good
from tests.simulation.policy_shapes import arrivals, bursty, mixed
from tools.simulator.cell import Arrival, Run

WINDOW_S = 4.0
LAYOUTS = (*FIXED, "dp2+tp2")
PASSES = 2


def planned(load: Sequence[Arrival], until_s: float, costs: CostModel, plan: Sequence[str]) -> Run:
    """Run a load by a plan: a layout for each window, the last one for the rest."""
    choices = [Arrangement(parse_layout(name, 4, WIDTHS)) for name in plan]
    space = LayoutSpace(4, {1: Mode.DP, 2: Mode.TP, 4: Mode.TP})

    def wanted(now_s: float) -> Arrangement:
        return choices[min(int(now_s / WINDOW_S), len(choices) - 1)]

    return PlannedCell(wanted, costs, SETTINGS, space).run(load, until_s)


def search(
    load: Sequence[Arrival], seconds: float, costs: CostModel
) -> tuple[int, int, tuple[str, ...]]:
    """Return what the best fixed layout and the best plan found serve well, and the plan."""
    windows = int(seconds / WINDOW_S) + 1

    def worth(plan: Sequence[str]) -> int:
        return good(planned(load, seconds + GRACE_S, costs, plan))

    fixed = {name: worth((name,)) for name in FIXED}
    first = max(fixed, key=fixed.__getitem__)
    best, plan = fixed[first], (first,) * windows
    for _ in range(PASSES):
        before = best
        for window in range(windows):
            for name in LAYOUTS:
                other = (*plan[:window], name, *plan[window + 1 :])
                if best < len(load) and other != plan and (found := worth(other)) > best:
                    best, plan = found, other
        if best == before:
            break
    return fixed[first], best, plan


def main() -> None:
    """Print the bounds of every preset."""
    for name, preset in (("bursty", bursty), ("mixed", mixed)):
        for seed in range(4):
            phases = preset(random.Random(seed))
            load = arrivals(phases, seed)
            fixed, best, plan = search(load, sum(each.seconds for each in phases), box_of(seed))
            print(f"{name} {seed}: {len(load)} came, fixed {fixed}, sequence {best}: {plan}")


if __name__ == "__main__":
    main()

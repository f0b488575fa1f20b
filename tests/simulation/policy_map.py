"""A map of the loads for which switching pays: best static layout, oracle and policy on each.

`python -m tests.simulation.policy_map 300 --out FILE` draws loads of low phases and bursts over
machines, mean rates, burst ratios and lengths, prompts and answers, tiers and goals, and writes the
map. The oracle knows when bursts begin and end, and has tried every pair of layouts for the two.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from statistics import mean

from comm_pool.layout import Mode, parse_layout
from coordinator.model.cost_model import CostModel
from coordinator.model.policy_settings import DEFAULT_GOALS, PolicySettings, TierGoal
from coordinator.policy.candidates import Arrangement, LayoutSpace, arrangements
from coordinator.protocol.terms import Tier
from tests.simulation.planned_cell import Plan, PlannedCell
from tests.simulation.policy_runs import GRACE_S
from tests.simulation.policy_shapes import (
    LLAMA_8B,
    LLAMA_70B_FP8,
    QWEN_32B,
    QWEN_32B_HALVES,
    Part,
    Phase,
    arrivals,
    busiest_rate,
)
from tools.simulator.cell import Run, SimCell

GAIN_CORNER = 1.3
"""A corner is where the oracle's goodput is this multiple of the best static layout's."""

BURST_SHARE = 0.25
"""A burst takes this share of its period."""

REQUESTS_MAX = 3_000
"""Larger loads are not drawn: they take minutes to simulate."""

LAGS_S = (0.0, 3.0)
"""How long after a burst the oracle may stay in the burst's layout."""

BOXES = {
    "70b-fp8": LLAMA_70B_FP8,
    "32b": QWEN_32B,
    "32b-halves": QWEN_32B_HALVES,
    "8b": LLAMA_8B,
}
BOX_RANKS = {"32b-halves": 4}
"""Boxes whose numbers hold for one number of ranks: what a pair borrows depends on it."""

LENGTHS = {
    "300+400": ((300, 400), (300, 400)),
    "1k+150": ((1_000, 150), (1_000, 150)),
    "4k+200": ((4_000, 200), (4_000, 200)),
    "8k+50": ((8_000, 50), (8_000, 50)),
    "300+400, bursts 4k+50": ((300, 400), (4_000, 50)),
}
"""Prompt and answer tokens: of the low phases, and of what bursts add."""

TIERS = {
    "standard": ({Tier.STANDARD: 1.0}, {Tier.STANDARD: 1.0}),
    "interactive": ({Tier.INTERACTIVE: 1.0}, {Tier.INTERACTIVE: 1.0}),
    "interactive+batch": (
        {Tier.INTERACTIVE: 0.3, Tier.BATCH: 0.7},
        {Tier.INTERACTIVE: 0.3, Tier.BATCH: 0.7},
    ),
    "interactive, bursts standard": ({Tier.INTERACTIVE: 1.0}, {Tier.STANDARD: 1.0}),
}
"""Shares of the requests by tier: of the low phases, and of what bursts add."""

DIMENSIONS: dict[str, tuple[object, ...]] = {
    "box": tuple(BOXES),
    "ranks": (2, 4, 8),
    "rate": (0.15, 0.4, 0.7, 0.95),
    "burst_ratio": (1, 4, 12),
    "burst_s": (5.0, 15.0, 30.0),
    "lengths": tuple(LENGTHS),
    "tiers": tuple(TIERS),
    "goals": (0.5, 1.0, 2.0),
}

CORNERS: dict[str, tuple[object, ...]] = {
    "box": ("70b-fp8", "32b", "32b-halves"),
    "ranks": (2, 4, 8),
    "rate": (0.25, 0.4, 0.6),
    "burst_ratio": (4, 12),
    "burst_s": (15.0, 30.0),
    "lengths": ("1k+150", "300+400", "300+400, bursts 4k+50"),
    "tiers": ("interactive", "interactive, bursts standard"),
    "goals": (0.5, 1.0),
}
"""Where low phases need wide groups for their goals, and bursts need replicas."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place on the map; `rate` is the mean rate in shares of what dp can serve."""

    box: str
    ranks: int
    rate: float
    burst_ratio: int
    burst_s: float
    lengths: str
    tiers: str
    goals: float
    """Multiple of the default goals: below 1 they are tighter."""

    @property
    def costs(self) -> CostModel:
        """The costs of its groups."""
        return BOXES[self.box]

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths whose steps were measured."""
        known = (1 if name == "dp1" else int(name[2:]) for name in self.costs.groups)
        return tuple(sorted(width for width in known if width <= self.ranks))

    @property
    def uniform(self) -> tuple[str, ...]:
        """The layouts of groups of one width: what a static server can be."""
        wide = ("+".join([f"tp{w}"] * (self.ranks // w)) for w in self.widths if w > 1)
        return (f"dp{self.ranks}", *wide)

    @property
    def mixed(self) -> tuple[str, ...]:
        """Layouts of one wide group beside dp ranks, which the oracle may choose too."""
        wide = [width for width in self.widths if 1 < width < self.ranks]
        return tuple(f"tp{width}+dp{self.ranks - width}" for width in wide)

    @property
    def settings(self) -> PolicySettings:
        """The policy's settings, with these goals."""
        goals = {tier: _scaled(goal, self.goals) for tier, goal in DEFAULT_GOALS.items()}
        return replace(PolicySettings(), goals=goals)

    @property
    def requests(self) -> float:
        """The expected number of requests."""
        return sum(part.rate * each.seconds for each in self.phases() for part in each.parts)

    def phases(self) -> list[Phase]:
        """Low, burst, low, and so on: at least 40 s and one whole period."""
        (prompt, output), added = LENGTHS[self.lengths]
        low_tiers, burst_tiers = TIERS[self.tiers]
        busiest = busiest_rate(self.costs, self.ranks, prompt, output)
        low = self.rate * busiest / (1 + BURST_SHARE * (self.burst_ratio - 1))
        # What a burst adds is as much work as that many of the low phase's requests.
        extra = (self.burst_ratio - 1) * low / busiest
        extra *= busiest_rate(self.costs, self.ranks, *added)
        base = tuple(Part(tier, low * s, prompt, output) for tier, s in low_tiers.items())
        more = tuple(Part(tier, extra * s, *added) for tier, s in burst_tiers.items())
        period_s = self.burst_s / BURST_SHARE
        side = Phase((period_s - self.burst_s) / 2, base)
        phases = []
        for _ in range(max(1, round(40 / period_s))):
            phases += [side, Phase(self.burst_s, (*base, *more)), side]
        return phases


@dataclass(frozen=True, slots=True)
class Result:
    """What a layout or a policy made of a load.

    `good` is the worth of the requests that ended within their goals: the sum of their tiers'
    weights. `latency` is the mean in units of the goals.
    """

    name: str
    good: float
    latency: float
    switches: int = 0

    @property
    def rank(self) -> tuple[float, float]:
        """The larger the better."""
        return self.good, -self.latency


@dataclass(frozen=True, slots=True)
class Reading:
    """One spot of the map."""

    spot: Spot
    asked: float
    """The worth of all requests."""
    static: Result
    oracle: Result
    policy: Result

    @property
    def gain(self) -> float:
        """The oracle's goodput in multiples of the best static layout's."""
        return max(1, self.oracle.good) / max(1, self.static.good)

    @property
    def kept(self) -> float:
        """The policy's goodput in multiples of the best static layout's."""
        return max(1, self.policy.good) / max(1, self.static.good)


def draw(seed: int, dimensions: Mapping[str, tuple[object, ...]]) -> Spot:
    """Return a spot; every dimension is drawn evenly, as far as the load is not too large."""
    rng = random.Random(seed)
    while True:
        chosen = {name: rng.choice(values) for name, values in dimensions.items()}
        spot = Spot(**chosen)  # type: ignore[arg-type]
        is_known = spot.ranks == BOX_RANKS.get(spot.box, spot.ranks)
        if is_known and spot.requests <= REQUESTS_MAX:
            return spot


def read(spot: Spot, seed: int) -> Reading:
    """Run one load in every static layout, as the oracle and with the policy."""
    phases = spot.phases()
    load = arrivals(phases, seed)
    until_s = sum(each.seconds for each in phases) + GRACE_S
    space = LayoutSpace(spot.ranks, _modes(spot))
    start = parse_layout(f"dp{spot.ranks}", spot.ranks, spot.widths)
    plain = [Arrangement(parse_layout(name, spot.ranks, spot.widths)) for name in spot.uniform]

    def result(name: str, run: Run) -> Result:
        latency = run.latency(spot.settings, until_s)
        return Result(name, run.goodput(spot.settings), latency, len(run.switches))

    def planned(low: Arrangement, burst: Arrangement, lag_s: float) -> Result:
        plan = _plan(phases, low, burst, lag_s)
        name = low.name if low == burst else f"{low.name} / {burst.name}"
        return result(name, PlannedCell(plan, spot.costs, spot.settings, space).run(load, until_s))

    fixed = {each.name: planned(each, each, 0.0) for each in plain}
    static = max(fixed.values(), key=lambda each: each.rank)
    mixed = [Arrangement(parse_layout(name, spot.ranks, spot.widths)) for name in spot.mixed]
    tiers = set().union(*TIERS[spot.tiers])
    choices = [each for one in (*plain, *mixed) for each in arrangements(one.layout, tiers)]
    oracle = _search(choices, fixed, planned)
    cell = SimCell(start, spot.costs, spot.settings, space)
    policy = result("policy", cell.run(load, until_s))
    asked = sum(spot.settings.goals[each.tier].weight for each in load)
    return Reading(spot, asked, static, oracle, policy)


def _search(
    choices: Sequence[Arrangement],
    fixed: dict[str, Result],
    planned: Callable[[Arrangement, Arrangement, float], Result],
) -> Result:
    """Return the best result of a pair of arrangements; one is improved after the other."""
    best = max(fixed.values(), key=lambda each: each.rank)
    low = burst = next(each for each in choices if each.name == best.name)
    for each in choices:
        if (found := planned(low, each, LAGS_S[0])).rank > best.rank:
            best, burst = found, each
    for each in choices:
        if (found := planned(each, burst, LAGS_S[0])).rank > best.rank:
            best, low = found, each
    for lag_s in LAGS_S[1:]:
        best = max(best, planned(low, burst, lag_s), key=lambda each: each.rank)
    return best


def _plan(phases: Sequence[Phase], low: Arrangement, burst: Arrangement, lag_s: float) -> Plan:
    bursts, start_s = [], 0.0
    for index, phase in enumerate(phases):
        if index % 3 == 1:
            bursts.append((start_s, start_s + phase.seconds + lag_s))
        start_s += phase.seconds

    def plan(now_s: float) -> Arrangement:
        return burst if any(begin <= now_s < end for begin, end in bursts) else low

    return plan


def _modes(spot: Spot) -> dict[int, Mode]:
    return {width: Mode.DP if width == 1 else Mode.TP for width in spot.widths}


def _scaled(goal: TierGoal, factor: float) -> TierGoal:
    def scaled(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * factor

    return replace(goal, ttft_s=scaled(goal.ttft_s), tpot_s=scaled(goal.tpot_s))


def _read_seed(seed: int, dimensions: Mapping[str, tuple[object, ...]]) -> Reading:
    return read(draw(seed, dimensions), seed)


def read_many(
    seeds: Sequence[int], processes: int, dimensions: Mapping[str, tuple[object, ...]]
) -> list[Reading]:
    """Return the readings of these seeds, with progress."""
    found = []
    with Pool(processes) as pool:
        read_one = partial(_read_seed, dimensions=dimensions)
        for number, each in enumerate(pool.imap(read_one, seeds), 1):
            found.append(each)
            if number % 10 == 0:
                print(f"{number}/{len(seeds)}", flush=True)
    return found


def main() -> None:
    """Draw the map."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spots", type=int)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--corners", action="store_true", help="only where switching may pay")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.spots)
    dimensions = CORNERS if options.corners else DIMENSIONS
    text = table(read_many(seeds, options.processes, dimensions))
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def table(readings: Sequence[Reading]) -> str:
    """Return the map as text: means by the values of each dimension, and the corners."""
    lines = [
        "| | spots | oracle / static | spots ≥ 1.3 | policy / static | worst | policy below 0.97 "
        "| latency: oracle / static | policy / static |",
        "|---|---|---|---|---|---|---|---|---|",
        _row("all", readings),
    ]
    for name, values in DIMENSIONS.items():
        for value in values:
            chosen = [each for each in readings if getattr(each.spot, name) == value]
            if chosen:
                lines.append(_row(f"{name} {value}", chosen))
    corners = sorted((each for each in readings if each.gain >= GAIN_CORNER), key=lambda e: -e.gain)
    gained = sum(each.oracle.good - each.static.good for each in corners)
    got = sum(each.policy.good - each.static.good for each in corners)
    if gained:
        lines += ["", f"In the corners the policy gets {got / gained:.2f} of the oracle's gain."]
    lines += ["", "| corner | asked | static | oracle | policy |", "|---|---|---|---|---|"]
    lines += [_line(each) for each in corners]
    worst = sorted(readings, key=lambda each: each.kept)[:8]
    lines += ["", "| worst for the policy | asked | static | oracle | policy |"]
    lines += ["|---|---|---|---|---|"]
    lines += [_line(each) for each in worst]
    return "\n".join(lines) + "\n"


def _row(name: str, readings: Sequence[Reading]) -> str:
    timed = [each for each in readings if each.static.latency]
    gains, kept = [e.gain for e in readings], [e.kept for e in readings]
    corners = sum(gain >= GAIN_CORNER for gain in gains)
    below = sum(each < 0.97 for each in kept)
    oracle = mean([e.oracle.latency / e.static.latency for e in timed] or [1.0])
    policy = mean([e.policy.latency / e.static.latency for e in timed] or [1.0])
    return (
        f"| {name} | {len(readings)} | {mean(gains):.3f} | {corners} | {mean(kept):.3f} "
        f"| {min(kept):.2f} | {below} | {oracle:.3f} | {policy:.3f} |"
    )


def _line(each: Reading) -> str:
    spot = each.spot
    name = (
        f"{spot.ranks} x {spot.box}, {spot.lengths}, {spot.tiers}, goals x {spot.goals}, rate "
        f"{spot.rate}, bursts x {spot.burst_ratio} of {spot.burst_s:.0f} s"
    )
    results = (each.static, each.oracle, each.policy)
    cells = [f"{one.name}: {one.good:g}, {one.latency:.2f}" for one in results[:2]]
    policy = each.policy
    cells.append(f"{policy.good:g}, {policy.latency:.2f}, {policy.switches} switches")
    return f"| {name} | {each.asked:g} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

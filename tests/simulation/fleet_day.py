"""A day of a fleet: how many cells it takes in fixed layouts and with the policy, and what is met.

What one cell makes of a steady rate is measured by the simulated cell, layout by layout. The day
then runs in seconds: a rate that follows the hours, bursts, chance; cells that share it evenly, as
the gateways' placement has them do (`test_fleet.py` checks that against cells that are simulated
one by one); an autoscaler; cells that take minutes to start. Requests that find no room wait.
`python -m tests.simulation.fleet_day` prints the tables of docs/fleet.md.
"""

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.protocol.terms import Tier
from tests.simulation.policy_runs import GRACE_S, SETTINGS, simulate
from tests.simulation.policy_shapes import LLAMA_70B_FP8, Part, Phase, arrivals
from tools.simulator.cell import is_good

DAY_S = 86_400
START_S = 180
"""From asking for a cell to its first token: weights, communicators, graphs."""
LOOK_EVERY_S = 15
KEPT_S = 900
"""A cell is kept for so long after it was needed last; the chart's `scaleDownSeconds`."""
GROWTH = 0.1
"""A fleet grows by a tenth of itself, at least by one cell, in a minute."""
RATE_WINDOW_S = 120
USES = tuple(percent / 100 for percent in range(95, 35, -5))
"""Parts of what a cell can do that an autoscaler by rate may load it with."""
USE_ASSUMED = 0.8
DAY_MET_MIN = 0.97
"""The part of a day's requests that are to see their goals."""
QUEUED_PER_CELL = 32
"""An autoscaler by queue asks for a cell for each so many requests that wait."""
MET_MIN = 0.97
"""What a cell can do is the highest rate of which it serves this part within the goals."""
PATIENCE_S = 1.0
"""A request that waits longer for a place does not see its goals."""
RATES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 24.0, 28.0)
SAMPLE_S = 60.0
ADAPTIVE = "adaptive"
LAYOUTS = ("dp4", "tp2+tp2", "tp4", ADAPTIVE)
SIZES = (10, 100, 1_000)


def load_of(rate: float, seconds: float) -> list[Phase]:
    """A steady load of `rate` requests per second: one in three interactive."""
    parts = (
        Part(Tier.INTERACTIVE, rate / 3, 600, 150),
        Part(Tier.STANDARD, rate * 2 / 3, 1_000, 150),
    )
    return [Phase(seconds, parts)]


@dataclass(frozen=True)
class Curve:
    """What a cell makes of steady rates: the part within goals, and the most it serves a second."""

    met: tuple[float, ...]
    most: float

    def met_at(self, rate: float) -> float:
        """The part of requests within their goals, between the measured rates by a line."""
        if rate <= RATES[0]:
            return self.met[0]
        if rate >= RATES[-1]:
            return self.met[-1]
        place = bisect_right(RATES, rate)
        low, high = RATES[place - 1], RATES[place]
        part = (rate - low) / (high - low)
        return self.met[place - 1] * (1 - part) + self.met[place] * part

    @property
    def can_do(self) -> float:
        """The highest measured rate that is served within the goals nearly always."""
        good = [rate for rate, met in zip(RATES, self.met, strict=True) if met >= MET_MIN]
        return max(good, default=RATES[0])


def measure(layout: str) -> Curve:
    """Run one cell at every rate."""
    met, most = [], 0.0
    for index, rate in enumerate(RATES):
        load = arrivals(load_of(rate, SAMPLE_S), index)
        fixed = None if layout == ADAPTIVE else layout
        run = simulate(load, SAMPLE_S + GRACE_S, LLAMA_70B_FP8, fixed)
        met.append(sum(is_good(each, SETTINGS) for each in run.requests) / len(load))
        ended = sum(each.end_s is not None and each.end_s <= SAMPLE_S for each in run.requests)
        most = max(most, ended / SAMPLE_S)
    return Curve(tuple(met), most)


def rates_of_day(cells: int, can_do: float, seed: int) -> list[float]:
    """Requests per second of a day that needs about so many cells at its height.

    A fifth of the height at night; bursts of one to three minutes, half as much again to twice the
    load of the hour, three an hour, which come to all cells at once.
    """
    draw = random.Random(seed)
    height = cells * can_do * USE_ASSUMED / 1.5
    bursts = [1.0] * DAY_S
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(1 / 1_200)) < DAY_S:
        factor = draw.uniform(1.5, 2.0)
        for second in range(int(at_s), min(DAY_S, int(at_s) + draw.randint(60, 180))):
            bursts[second] = max(bursts[second], factor)
    return [
        height * (0.6 - 0.4 * math.cos(2 * math.pi * second / DAY_S)) * bursts[second]
        for second in range(DAY_S)
    ]


@dataclass(frozen=True)
class Seen:
    """What an autoscaler looks at."""

    rate: float
    """Mean arrivals per second of the last two minutes."""
    queued: float
    ready: int


Autoscaler = Callable[[Seen], int]


def by_queue(seen: Seen) -> int:
    """One cell more for each so many requests that wait; few where none does."""
    return math.ceil(seen.queued / QUEUED_PER_CELL) + (seen.ready if seen.queued else 1)


def by_rate(can_do: float, use: float) -> Autoscaler:
    """So many cells that each has a part of what it can do."""
    return lambda seen: math.ceil(seen.rate / (use * can_do))


@dataclass(frozen=True)
class Day:
    """What a day took and what it gave."""

    cell_hours: float
    most_cells: int
    met: float
    waited: float
    """The part of requests that waited for a place for longer than is bearable."""
    started: int
    """Cells that were started after the first ones."""


def run_day(rates: Sequence[float], curve: Curve, wanted: Autoscaler, seed: int) -> Day:
    """Run a day second by second."""
    draw = random.Random(seed)
    ready, starting, started = max(1, wanted(Seen(rates[0], 0.0, 1))), deque[int](), 0
    recent, asked_for = deque[float](maxlen=RATE_WINDOW_S), deque[tuple[int, int]]()
    backlog = met = waited = total = cell_seconds = 0.0
    most = ready
    for second, rate in enumerate(rates):
        while starting and starting[0] <= second:
            starting.popleft()
            ready += 1
        came = max(0.0, draw.gauss(rate, math.sqrt(rate)))  # Poisson's, as good as.
        recent.append(came)
        place = ready * curve.most
        wait_s = backlog / place
        backlog = max(0.0, backlog + came - place)
        is_late = wait_s > PATIENCE_S
        met += 0.0 if is_late else came * curve.met_at(came / ready)
        waited += came if is_late else 0.0
        total += came
        cell_seconds += ready + len(starting)
        most = max(most, ready + len(starting))
        if second % LOOK_EVERY_S:
            continue
        need = max(1, wanted(Seen(sum(recent) / len(recent), backlog, ready)))
        asked_for.append((second, need))
        while asked_for[0][0] < second - KEPT_S:
            asked_for.popleft()
        kept = max(each for _, each in asked_for)
        have = ready + len(starting)
        if need > have:
            grow = min(need - have, max(1, int(have * GROWTH * LOOK_EVERY_S / 60)))
            starting.extend([second + START_S] * grow)
            started += grow
        elif kept < have and not starting:
            ready = max(1, kept)
    return Day(cell_seconds / 3_600, most, met / total, waited / total, started)


def cheapest(rates: Sequence[float], curve: Curve, seed: int) -> tuple[float, Day]:
    """The fullest cells, scaled by rate, with which a day's goals are met; what that day took."""
    for use in USES:
        day = run_day(rates, curve, by_rate(curve.can_do, use), seed)
        if day.met >= DAY_MET_MIN:
            break
    return use, day


def row(size: int, words: str, day: Day) -> str:
    """One line of the table of days."""
    return (
        f"| {size} | {words} | {day.cell_hours:.0f} | {day.most_cells} | {day.started} "
        f"| {100 * day.met:.1f} % | {100 * day.waited:.2f} % |"
    )


def main() -> None:
    """Print what cells can do, and a day of fleets of all sizes."""
    curves = {layout: measure(layout) for layout in LAYOUTS}
    print("| cell | within goals up to, requests/s | serves at most, requests/s |")
    print("|---|---|---|")
    for layout, curve in curves.items():
        print(f"| {layout} | {curve.can_do:g} | {curve.most:.1f} |")
    print("\n| cells | scaled | cell hours | most | started | within goals | waited |")
    print("|---|---|---|---|---|---|---|")
    own, least = curves[ADAPTIVE], curves["tp4"]
    for size in SIZES:
        rates = rates_of_day(size, own.can_do, size)
        for layout, curve in curves.items():
            use, day = cheapest(rates, curve, size)
            print(row(size, f"{layout}, by rate to {use:.0%} of what it can do", day))
        blind = by_rate(least.can_do, USE_ASSUMED)
        for words, wanted in (
            (f"{ADAPTIVE}, by rate to {USE_ASSUMED:.0%}", by_rate(own.can_do, USE_ASSUMED)),
            (f"{ADAPTIVE}, by rate, as if it kept the layout of low load", blind),
            (f"{ADAPTIVE}, by queue", by_queue),
        ):
            print(row(size, words, run_day(rates, own, wanted, size)))


if __name__ == "__main__":
    main()

"""Draws walks through layouts in which every pair of what can come together in a switch comes.

A switch is a row: the layout that it leaves, the one that it goes to, what it does to the running
tasks, the moment at which it is asked for, and the kind of a request that it meets. To try every
row takes days; most faults need no more than two values to come together, and every such pair
comes in some ninety rows. Pure: a walk is a function of its seed.
"""

import functools
import os
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import combinations, pairwise, product

SEED_ENV = "AILERON_MATRIX_SEED"
"""Where it is set, its walk is drawn instead of the day's."""

START = "dp4"
"""Every walk begins here."""
LAYOUTS = (
    *(START, "tp2+dp2", "tp2+tp2", "dp2+tp2", "tp4"),
    *("sp4", "sp2tp2", "sp2+tp2", "shift2+dp2", "shift4"),
)


class Plan(StrEnum):
    """What a switch does to running tasks, as operators write it."""

    RESHARD = "reshard"
    SPECULATE = "speculate"
    PAUSE = "pause"
    DRAIN = "drain"
    RECOMPUTE = "recompute"


class Moment(StrEnum):
    """When a switch is asked for."""

    PREFILL = "prefill"
    """The request's prompt is being read."""
    DECODE = "decode"
    """The request has some of its tokens."""
    QUEUE = "queue"
    """Several prompts came at once: some wait for their turn."""
    AFTER = "after"
    """At once after another switch, which the request has crossed, too."""
    OVERTAKEN = "overtaken"
    """Another layout is asked for while it is under way, and then it again."""
    IDLE = "idle"
    """No request is there."""


class Kind(StrEnum):
    """The request that a switch meets."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    GRAMMAR = "grammar"
    PENALTIES = "penalties"
    STOPS = "stops"
    """Some tokens end it."""
    LEAVES = "leaves"
    """Its client leaves before its end."""
    NONE = "none"
    """Of idle switches."""


WAITS = frozenset({Plan.DRAIN, Plan.SPECULATE})
"""Plans that wait until what runs has ended: nothing of it is left for the next switch."""

COSTS = {Plan.RECOMPUTE: 1, Plan.PAUSE: 2, Plan.SPECULATE: 3, Plan.DRAIN: 3}
"""How long plans keep streams waiting, by rank: where any plan would do, KV moves."""


@dataclass(frozen=True)
class Row:
    """One switch of a walk."""

    origin: str
    target: str
    plan: Plan
    moment: Moment
    kind: Kind

    @functools.cache  # noqa: B019 -- there are eleven thousand rows, and each is asked often
    def pairs(self) -> frozenset["Pair"]:
        """What comes together in it, two by two."""
        values = [(name, str(value)) for name, value in vars(self).items()]
        return frozenset(map(frozenset, combinations(values, 2)))

    def __str__(self) -> str:
        return f"{self.origin} > {self.target}, {self.plan}, {self.moment}, {self.kind}"


Pair = frozenset[tuple[str, str]]
Circumstances = tuple[Plan, Moment, Kind]

CIRCUMSTANCES: tuple[Circumstances, ...] = tuple(
    (plan, moment, kind)
    for plan, moment, kind in product(Plan, Moment, Kind)
    if (moment is Moment.IDLE) == (kind is Kind.NONE)
)


def wanted_pairs() -> set[Pair]:
    """All pairs that can come together: a layout is left for another, and nobody is met idle."""
    edges = [(one, other) for one, other in product(LAYOUTS, LAYOUTS) if one != other]
    # Plan, moment and kind come with any edge; of an edge's ends, each is in some row.
    rows = [Row(*edges[0], plan, moment, kind) for plan, moment, kind in CIRCUMSTANCES]
    found = {pair for row in rows for pair in row.pairs() if not _layouts(pair)}
    found |= {frozenset({("origin", one), ("target", other)}) for one, other in edges}
    for end, layout in product(("origin", "target"), LAYOUTS):
        for name, values in (("plan", Plan), ("moment", Moment), ("kind", Kind)):
            found |= {frozenset({(end, layout), (name, str(value))}) for value in values}
    return found


def _layouts(pair: Pair) -> set[str]:
    return {name for name, _ in pair} & {"origin", "target"}


def may_follow(row: Row, last: Row | None) -> bool:
    """Say whether the moment of a row can be met after the one before it."""
    if row.moment is not Moment.AFTER:
        return True
    return last is not None and last.plan not in WAITS and last.moment is not Moment.IDLE


def day_seed() -> int:
    """The seed of the day, or the one that is asked for."""
    given = os.environ.get(SEED_ENV)
    return int(given) if given else int(datetime.now(UTC).strftime("%Y%m%d"))


def draw_walk(seed: int) -> list[Row]:
    """Rows in which every wanted pair comes; each begins in the layout in which the last ended."""
    draw = random.Random(seed)
    missing = wanted_pairs()
    walk: list[Row] = []
    for origin, target in _tour(draw):
        walk.append(_best_row([(origin, target)], missing, walk, draw))
        missing.difference_update(walk[-1].pairs())
    while missing:
        here = walk[-1].target if walk else START
        edges = [(here, layout) for layout in LAYOUTS if layout != here]
        row = _best_row(edges, missing, walk, draw)
        if missing.isdisjoint(row.pairs()):
            # What is missing begins elsewhere, or not after such a row as the last one.
            starts = {v for pair in missing for name, v in pair if name == "origin"} - {here}
            edge = here, draw.choice(sorted(starts or {*LAYOUTS} - {here}))
            row = _best_row([edge], missing, walk, draw)
        walk.append(row)
        missing.difference_update(row.pairs())
    return walk


def _tour(draw: random.Random) -> list[tuple[str, str]]:
    """Every layout to every other one, each once, in one go (Hierholzer)."""
    left = {layout: [each for each in LAYOUTS if each != layout] for layout in LAYOUTS}
    for targets in left.values():
        draw.shuffle(targets)
    stack, tour = [START], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            tour.append(stack.pop())
    tour.reverse()
    return list(pairwise(tour))


def _best_row(
    edges: list[tuple[str, str]], missing: set[Pair], walk: list[Row], draw: random.Random
) -> Row:
    """The row that brings the most missing pairs; of equal ones the cheapest, then by chance."""
    last = walk[-1] if walk else None
    rows = [
        row
        for edge, (plan, moment, kind) in product(edges, CIRCUMSTANCES)
        if may_follow(row := Row(*edge, plan, moment, kind), last)
    ]

    def worth(row: Row) -> tuple[int, int, float]:
        gain = len(missing & row.pairs())
        cost = COSTS.get(row.plan, 0) + (row.moment is Moment.IDLE)
        return gain, -cost, draw.random()

    return max(rows, key=worth)


def describe(walk: list[Row], seed: int) -> str:
    """The walk in short, with the seed and the way to run it again."""
    lines = [
        f"{len(walk)} switches, {len(wanted_pairs())} pairs, seed {seed};"
        f" again: {SEED_ENV}={seed} pytest tests/integration/test_switch_matrix.py"
    ]
    for names, values in (("plan", Plan), ("moment", Moment), ("kind", Kind)):
        counts = {str(v): sum(getattr(row, names) is v for row in walk) for v in values}
        lines.append(f"  {names}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    lines.append("  from \\ to (plan and moment by their first letters):")
    lines.append(" " * 13 + "".join(f"{layout:>11}" for layout in LAYOUTS))
    for origin in LAYOUTS:
        cells = []
        for target in LAYOUTS:
            met = [row for row in walk if (row.origin, row.target) == (origin, target)]
            cells.append(" ".join(f"{row.plan[:2]}{row.moment[:2]}" for row in met))
        lines.append(f"  {origin:<11}" + "".join(f"{text:>11}" for text in cells))
    return "\n".join(lines)

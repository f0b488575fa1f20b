"""Faults of the participant's rules: `python -m tests.simulation.rule_faults [--seeds 2000]`.

Each takes one row of the table away, or one fact that rows name. The command tries every fault with
more and more seeds, and prints the first seed that finds it.
"""

import argparse
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.switch_rules import (
    LATER,
    RULES,
    Action,
    Asks,
    Fact,
    Position,
    Rule,
    RuleTable,
    Wanted,
)
from coordinator.protocol.switch_situation import Situation
from coordinator.protocol.terms import Carry, Phase
from tests.simulation.mutations import Patch, patched
from tests.simulation.seeds import CALM, WIDE
from tests.simulation.sweep import NARROW, Kind, failure_of

COLUMNS: dict[str, Any] = {"at": Position, "wanted": Wanted, "phases": Phase, "plans": Carry}


class Run(NamedTuple):
    """One run of the simulation."""

    seed: int
    meddle: float | None = None
    kind: Kind = NARROW


WORLDS = ((None, NARROW), (0.1, NARROW), (0.3, NARROW), (None, CALM), (None, WIDE))
"""Meddling and kind of the runs of a seed."""


def without(row: int) -> tuple[Rule, ...]:
    """Return the rules without one; ranks that it made act wait, and those that waited act."""
    gone = RULES[row]
    others = RULES[:row] + RULES[row + 1 :]
    if gone.action is not Action.WAIT:
        return (*others, replace(gone, action=Action.WAIT))
    if Asks.LATER_STAGE not in gone.asks:
        return (*others, *_as_if_later(gone))
    return (*others, replace(gone, action=Action.LEAVE))


def _as_if_later(gone: Rule) -> Iterator[Rule]:
    """What ranks do that take the directive for a later one."""
    for rule in RULES:
        if rule.asks != LATER:
            continue
        cells: dict[str, Any] = {
            column: _both(getattr(rule, column), getattr(gone, column), whole)
            for column, whole in COLUMNS.items()
        }
        if all(cells.values()):
            yield replace(rule, asks=gone.asks, **cells)


def _both(one: Collection[Any], other: Collection[Any], whole: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(each for each in whole if each in (one or whole) and each in (other or whole))


def _never(fact: Fact) -> Patch:
    """The fact holds nowhere."""

    def is_true(self: Situation, asked: Fact) -> bool:
        return asked is not fact and _is_true(self, asked)

    return Situation, "is_true", is_true


_is_true = Situation.is_true

ROWS: dict[str, Patch] = {
    f"row {row + 1}, {rule.action.name}": (SwitchParticipant, "table", RuleTable(without(row)))
    for row, rule in enumerate(RULES)
}
FAULTS: dict[str, Patch] = ROWS | {f"never {fact.name}": _never(fact) for fact in Fact}


def finds(fault: str, run: Run) -> bool:
    """Return whether the simulation fails with the fault."""
    with patched([FAULTS[fault]]):
        return failure_of(*run) is not None


def first_run(fault: str, seeds: Iterable[int]) -> Run | None:
    """Return the first run that finds the fault."""
    runs = (Run(seed, *world) for seed in seeds for world in WORLDS)
    return next((run for run in runs if finds(fault, run)), None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.rule_faults")
    parser.add_argument("--seeds", type=int, default=2_000, help="how many seeds may be tried")
    parser.add_argument("faults", nargs="*", help="all if none is named")
    chosen = parser.parse_args()
    not_found = []
    for fault in chosen.faults or FAULTS:
        run = first_run(fault, range(chosen.seeds))
        print(f"{fault}: {run or 'NOT FOUND'}", flush=True)
        not_found += [] if run else [fault]
    print(f"{len(not_found)} faults not found")
    return int(bool(not_found))


if __name__ == "__main__":
    sys.exit(main())

"""Which seeds run beside the fixed ones: those that found something, and the day's of a long range.

`make chaos` runs the long ranges, `make test` the share of a day: seven days in a row are all of
them. `AILERON_SEED_DAY=2026-11-26 make test` runs the share of another day.
"""

import os
from dataclasses import dataclass
from datetime import UTC, date, datetime

from tests.simulation.sweep import NARROW, Kind, replay_of

DAYS = 7
DAY_VARIABLE = "AILERON_SEED_DAY"

WIDE, PARTS, BORROW = Kind(wide=True), Kind(parts=True), Kind(parts=True, borrow=True)


@dataclass(frozen=True)
class Long:
    """The seeds of one kind that only the long run runs all of."""

    kind: Kind
    seeds: range


LONG = {
    "narrow": Long(NARROW, range(100, 1_920)),
    "wide": Long(WIDE, range(60, 172)),
    "parts": Long(PARTS, range(50, 302)),
    "borrow": Long(BORROW, range(25, 200)),
}
"""A seventh of each: 260 at 0.09 s, 16 at 0.25 s, 36 and 25 at 0.11 s of a core are some 34 s."""


@dataclass(frozen=True)
class Found:
    """A seed that failed once."""

    seed: int
    kind: Kind
    what: str

    def __str__(self) -> str:
        return replay_of(self.seed, self.kind)


FOUND = (
    Found(436, NARROW, "a step begins in the tick in which a follower that had no room leaves"),
    Found(8948, NARROW, "a step begins after a follower that had no room has left its group"),
    Found(2220, NARROW, "a follower without room is cut out and taken in again within a step"),
    Found(19071, NARROW, "who had no room joins another group before it has told of that"),
    Found(105948, NARROW, "the only process that told a new coordinator of a commit ends"),
    Found(108951, NARROW, "a follower joins by a late commit and has given up its lease"),
    Found(206468, NARROW, "a leader takes a lease that was given up into its next formation"),
    Found(304350, WIDE, "a gateway that stood still takes a token that is on its way for lost"),
    Found(320544, WIDE, "a lone task has all pages of its group, and the rank has a few free"),
    Found(128, PARTS, "a coordinator that has heard a part of a block starts that again alone"),
    Found(210117, PARTS, "a task is given back in a move that fails, and its session is lost"),
    Found(286, PARTS, "the same, with a whole block beside it"),
)


def share_of(seeds: range, day: date) -> range:
    """The seeds of a day; any seven days in a row have all of them, and each of them once."""
    number = day.toordinal() % DAYS
    return seeds[len(seeds) * number // DAYS : len(seeds) * (number + 1) // DAYS]


def today() -> date:
    """The day in UTC, or the one that a failure of another day is replayed of."""
    told = os.environ.get(DAY_VARIABLE)
    return date.fromisoformat(told) if told else datetime.now(UTC).date()

"""Which seeds run beside the fixed ones: those that found something, and the day's of a long range.

`make chaos` runs the long ranges, `make test` the share of a day: 14 days in a row are all of
them. `AILERON_SEED_DAY=2026-11-26 make test` runs the share of another day.
"""

import os
from dataclasses import dataclass
from datetime import UTC, date, datetime

from tests.simulation.sweep import NARROW, Kind, replay_of

DAYS = 14
DAY_VARIABLE = "AILERON_SEED_DAY"

WIDE, PARTS, BORROW = Kind(wide=True), Kind(parts=True), Kind(parts=True, borrow=True)
PRECOPY, WIDE_PRECOPY = Kind(precopy=True), Kind(wide=True, precopy=True)
PIPELINES = Kind(pipelines=True)
CALM = Kind(calm=True)


@dataclass(frozen=True)
class Long:
    """The seeds of one kind that only the long run runs all of."""

    kind: Kind
    seeds: range


LONG = {
    "narrow": Long(NARROW, range(100, 940)),
    "wide": Long(WIDE, range(60, 116)),
    "parts": Long(PARTS, range(50, 176)),
    "borrow": Long(BORROW, range(25, 109)),
    "precopy": Long(PRECOPY, range(10, 500)),
    "wide precopy": Long(WIDE_PRECOPY, range(60)),
    "pipelines": Long(PIPELINES, range(20, 126)),
    "calm": Long(CALM, range(140)),
}
"""The share of a day: 105 at 0.2 s, 23 at 0.25 s and 8 at 0.4 s of a core are some 30 s."""


@dataclass(frozen=True)
class Found:
    """A seed that failed once."""

    seed: int
    kind: Kind
    what: str

    def __str__(self) -> str:
        return replay_of(self.seed, self.kind)


FOUND = (
    Found(66, NARROW, "a process stands still between its look at its lease and its step"),
    Found(1_000_146, NARROW, "a coordinator hears only of the one who does not know of a commit"),
    Found(1_000_887, NARROW, "a task needs pages that came free since the groups were formed"),
    Found(2_000_081, NARROW, "a leader stands still while a member closes their lost group"),
    Found(5_001_478, NARROW, "pages are given up while tasks of their group wait for a migration"),
    Found(741, NARROW, "a leader whose step had no room is let in again under a plan that drains"),
    Found(7_302_662, NARROW, "a follower has left a step whose leader had no room, and is back"),
    Found(7_501_413, NARROW, "a rank of a group that stays hears of a switch after it is served"),
    Found(8_000_890, NARROW, "a task is placed again on the rank that a move has brought it to"),
    Found(8_314_316, NARROW, "a task is moved to a group with too few pages for its last tokens"),
    Found(463, NARROW, "a group that counts as lost goes on, and its blocks get other content"),
    Found(1_000_552, BORROW, "a watchdog ends one rank, and those that share its copy live on"),
    Found(1_000_755, PARTS, "a rank that has joined its next group is asked to move its share"),
    Found(3_001_852, PRECOPY, "a group is lost before its leader has begun"),
    Found(3_000_224, PRECOPY, "a group leaves an aborted formation while others copy early"),
    Found(120, PRECOPY, "a new coordinator uses an epoch again for which ranks have copied early"),
    Found(10_390, PIPELINES, "a task is alone in a group of four stages"),
    Found(86, CALM, "an operator gives a switch that is under way another plan"),
    Found(24, WIDE, "a leader that was cut out probes the group that it has just been let into"),
    Found(238, WIDE, "a task ends between the commit of its migration and the join that follows"),
    Found(8_100_070, WIDE, "pages of a lost group stay, of which a migration has taken some"),
    Found(1_000_731, WIDE, "a coordinator recovers while those who know of a commit are cut off"),
)


def share_of(seeds: range, day: date) -> range:
    """The seeds of a day; any 14 days in a row have all of them, and each of them once."""
    number = day.toordinal() % DAYS
    return seeds[len(seeds) * number // DAYS : len(seeds) * (number + 1) // DAYS]


def today() -> date:
    """The day in UTC, or the one that a failure of another day is replayed of."""
    told = os.environ.get(DAY_VARIABLE)
    return date.fromisoformat(told) if told else datetime.now(UTC).date()

"""Random faults, many seeds: the invariants hold; and with a bug put in, some seed finds it.

More seeds are in `test_seeds`: those of the day, and all of them in `make chaos`.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from tests.simulation.mutations import MUTATIONS, OF_PIPELINES, RARE, mutated
from tests.simulation.seeds import BORROW, PARTS, PIPELINES
from tests.simulation.stats import Stats
from tests.simulation.sweep import NARROW, failure_of, replay_of, world_of
from tests.simulation.world import FAILURES, World

SEEDS = 60
SEEDS_OF_PARTS = 25
SEEDS_OF_LOANS = range(14, 26)
SEEDS_OF_A_BUG = 500
"""A bug that none of these seeds finds counts as not found."""
CHUNK = 30

MEDDLES = (None, 0.1, 0.3)
"""Enough to find bugs that need two things to go wrong while KV moves."""

FOUND_BY = {
    "requeue loses tokens": 1,
    "followers wait for a leader that never came": 6,
    "who had no room stays in": 23,
    "followers join only what is wanted": 697,
    "leaders drain groups that never served": 2,
    "defer no command": 8,
    "groups begin before their copies are over": 22,
    "closed groups are formed again": 119,
    "rounds do not wait": 8,
    "restarts are ignored": 25,
    "pages that have changed are inherited": 45,
    "half joined groups stay": 61,
    "accept stale attempts": 2,
    "lease longer than patience": 12,
    "no lease": 12,
    "followers do not wait for their leader's last step": 6,
    "grants not equal": 2,
    "gateway ignores fences": 3,
    "commit although a rank failed": 55,
    "adopt without a new attempt": 2,
    "take any commit for one's own": 14,
    "pool keeps the old leader": 2,
    "hand nothing over": 2,
    "copies do not wait for steps": 513,
    "follower leaves without its leader": 4,
    "followers drop what comes before they join": 2,
    "steps of lost groups count": 125,
    "nobody hears of lost leases": 80,
    "spoiled tasks go on": 3,
    "tasks go on without their last tokens": 3,
    "copies change pages that can be read": 146,
    "groups begin in pages that can be read": 52,
    "new processes empty pages that can be read": 2,
    "blocks are entered before they are full": 35,
    "blocks keep their entries": 45,
    "entries come back as they were": 463,
    "a found place is always there": 2,
    "groups are left with planned steps": 2,
    "only the oldest planned step is finished": 55,
    "planned steps outlive their formation": 18,
    "pp and tp of the same ranks have one lease": 8,
    "a joined pipeline group is taken for tp": 14,
    "stages are taken for ranges of heads": 8,
}
"""Seeds that found bugs which few find: they are tried first.

A change of what worlds draw makes some of them find nothing; the end of a run names others.
"""


@functools.cache
def unmeddled(seed: int) -> Stats:
    """What a simulation came to, run once for all who ask; no bug may be put in."""
    return World(seed).run()


def known_failure_of(seed: int) -> str | None:
    try:
        unmeddled(seed)
    except FAILURES as error:
        return f"{replay_of(seed)}    {error}"
    return None


def test_they_hold_where_ranks_hold_parts_of_the_weights() -> None:
    """And every cell comes to rest with groups that have all of them, all tasks ended."""
    seeds = range(SEEDS_OF_PARTS)
    failures = [failure for seed in seeds if (failure := failure_of(seed, kind=PARTS))]
    assert not failures, "\n".join(failures)


@functools.cache
def borrowing(seed: int) -> tuple[bool, Stats]:
    """Whether memory outlives its process in this world, and what the run came to."""
    world = world_of(seed, BORROW)
    return world.settings.parts.outlive, world.run()


def failure_of_loans(seed: int) -> str | None:
    try:
        borrowing(seed)
    except FAILURES as error:
        return f"{replay_of(seed, BORROW)}    {error}"
    return None


def test_they_hold_where_ranks_borrow_the_parts_that_they_lack() -> None:
    """In all layouts; a step never lacks a part."""
    failures = [failure for seed in SEEDS_OF_LOANS if (failure := failure_of_loans(seed))]
    assert not failures, "\n".join(failures)


def test_ranks_borrow_of_those_that_have_ended_where_memory_outlives_them() -> None:
    runs = [borrowing(seed) for seed in SEEDS_OF_LOANS]
    assert sum(run.lent_by_the_dead for outlive, run in runs if outlive) > 20
    assert not any(run.lent_by_the_dead for outlive, run in runs if not outlive)
    assert sum(run.borrowed for _, run in runs) > 1_000


def test_tasks_load_of_the_dead_where_their_memory_is_trusted() -> None:
    worlds = [World(seed) for seed in range(SEEDS)]
    trust = [each.faults.shares_memory and each.faults.trusts_memory for each in worlds]
    runs = [unmeddled(seed) for seed in range(SEEDS)]
    pairs = list(zip(trust, runs, strict=True))
    assert sum(run.loaded_of_the_dead for is_trusted, run in pairs if is_trusted) > 50
    assert sum(run.inherited for is_trusted, run in pairs if is_trusted) > 50
    for each in ("loaded_of_the_dead", "inherited"):
        assert not any(getattr(run, each) for is_trusted, run in pairs if not is_trusted)
    assert sum(run.loaded_of_wide for run in runs) > 50
    assert sum(run.void for run in runs) > 0, "whatever was loaded was there"


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_invariants_hold_under_faults(first: int) -> None:
    seeds = range(first, first + CHUNK)
    failures = [failure for seed in seeds if (failure := known_failure_of(seed))]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each not in RARE])
@pytest.mark.timeout(600)
def test_a_bug_is_found(mutation: str, record_property: Callable[[str, object], None]) -> None:
    """By the seed that is named first; the search for another one takes minutes, and names it."""
    named = FOUND_BY.get(mutation, 0)
    kind = PIPELINES if mutation in OF_PIPELINES else NARROW
    with mutated(mutation):
        seeds = chain([named], range(SEEDS_OF_A_BUG))
        runs = ((seed, meddle) for seed in seeds for meddle in MEDDLES)
        found = next((seed for seed, meddle in runs if failure_of(seed, meddle, kind)), None)
    assert found is not None, f"no seed finds: {mutation}"
    if found != named:
        record_property("summary", f'FOUND_BY: seed {named} finds no longer "{mutation}": {found}')


def test_a_seed_can_be_replayed() -> None:
    lines: list[str] = []
    first = World(7, trace=lines.append).run()
    assert World(7).run() == first
    assert any("core -> rank" in line for line in lines)


def test_a_seed_is_replayed_in_any_process() -> None:
    """A set of names has another order in each; this seed depended on one."""
    traces = set()
    for order in ("0", "3"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "5186"],
            env={**os.environ, "PYTHONHASHSEED": order},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        # A probe's line has how long it took in truth.
        lines = [each for each in done.stdout.splitlines() if "mode_probed" not in each]
        assert len(lines) > 100
        traces.add("\n".join(lines))
    assert len(traces) == 1


def test_simulations_reach_what_they_are_for() -> None:
    runs = [unmeddled(seed) for seed in range(SEEDS)]
    assert sum(run.steps for run in runs) > 5_000
    assert sum(run.switches for run in runs) > 200
    assert sum(run.crashes for run in runs) > 10
    assert sum(run.stuck for run in runs) > 0, "nobody was stuck with a dead peer"
    assert sum(run.without_room for run in runs) > 10, "no step found no room"
    assert sum(run.closed for run in runs) > 0, "nobody got out of a step by closing its group"
    assert sum(run.reunited for run in runs) > 0, "no group was started again together"
    assert sum(run.rejoined for run in runs) > 10, "no rank joined the others again"
    assert sum(run.core_crashes for run in runs) > 5
    assert sum(run.blocked for run in runs) > 0, "no leader ever found its queue full"
    assert sum(run.moved for run in runs) > 50
    assert sum(run.meetings for run in runs) > 20, "no copy was late"
    assert sum(run.failed_moves for run in runs) > 0
    assert sum(run.overtaken_moves for run in runs) > 0
    assert sum(run.spoiled_moves for run in runs) > 0
    assert sum(run.ends.get("finished", 0) for run in runs) > 500

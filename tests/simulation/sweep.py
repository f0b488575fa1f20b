"""Many seeds, in one process or in several; neither torch nor vLLM is imported."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from tests.simulation.calm import CalmWorld
from tests.simulation.mutations import mutated
from tests.simulation.world import FAILURES, World

PROGRESS_S = 5.0
"""How often a sweep says how far it is."""

SEEDS_AT_ONCE = 4
"""Seeds that a process of a sweep is given at a time."""


@dataclass(frozen=True)
class Kind:
    """What is simulated; see `World`."""

    wide: bool = False
    parts: bool = False
    borrow: bool = False
    precopy: bool = False
    pipelines: bool = False
    calm: bool = False
    """Nothing breaks but processes; see `CalmWorld`."""
    mutation: str | None = None
    """The bug that is put in."""


@dataclass(frozen=True)
class Outcome:
    """What one seed came to."""

    cpu_s: float
    failure: str | None


NARROW = Kind()


def replay_of(seed: int, kind: Kind = NARROW) -> str:
    """The command that shows a failure again."""
    flags = {
        "WIDE": kind.wide,
        "PARTS": kind.parts,
        "BORROW": kind.borrow,
        "PRECOPY": kind.precopy,
        "PIPELINES": kind.pipelines,
        "CALM": kind.calm,
    }
    return " ".join([f"make sim SEED={seed}", *(f"{name}=1" for name, on in flags.items() if on)])


def world_of(
    seed: int,
    kind: Kind = NARROW,
    *,
    meddle: float | None = None,
    trace: Callable[[str], None] | None = None,
) -> World:
    """The world of a seed and a kind."""
    make = CalmWorld if kind.calm else World
    return make(
        seed,
        trace,
        meddle,
        wide=kind.wide,
        parts=kind.parts,
        borrow=kind.borrow,
        precopy=kind.precopy,
        pipelines=kind.pipelines,
    )


def failure_of(seed: int, meddle: float | None = None, kind: Kind = NARROW) -> str | None:
    """Run a seed; return the command that shows its failure again and what failed, if it did."""
    try:
        world_of(seed, kind, meddle=meddle).run()
    except FAILURES as error:
        return f"{replay_of(seed, kind)}    {error}"
    return None


def sweep(seeds: range, kind: Kind, jobs: int) -> int:
    """Print each failure when it is found, and the totals last; return how many failed."""
    failed = 0
    cpu_s = 0.0
    began_s = said_s = time.monotonic()
    for done, outcome in enumerate(_outcomes(seeds, kind, jobs), 1):
        cpu_s += outcome.cpu_s
        if outcome.failure is not None:
            failed += 1
            print(outcome.failure, flush=True)
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print(f"{done:,} of {len(seeds):,} seeds, {failed} failed", flush=True)
    each_s, took_s = cpu_s / len(seeds), time.monotonic() - began_s
    print(f"{each_s:.3f} s of processor time per seed: {3600 / each_s:,.0f} an hour on one core")
    print(f"{failed} of {len(seeds):,} seeds failed, {seeds[0]} to {seeds[-1]}, in {took_s:.0f} s")
    return failed


def _outcomes(seeds: range, kind: Kind, jobs: int) -> Iterator[Outcome]:
    """With several processes they come in any order."""
    shares = [seeds[at : at + SEEDS_AT_ONCE] for at in range(0, len(seeds), SEEDS_AT_ONCE)]
    if jobs == 1:
        for share in shares:
            yield from _outcomes_of(share, kind)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for run in as_completed([pool.submit(_outcomes_of, share, kind) for share in shares]):
            yield from run.result()


def _outcomes_of(seeds: Sequence[int], kind: Kind) -> list[Outcome]:
    outcomes = []
    with mutated(kind.mutation):
        for seed in seeds:
            began_s = time.process_time()
            failure = failure_of(seed, kind=kind)
            outcomes.append(Outcome(time.process_time() - began_s, failure))
    return outcomes

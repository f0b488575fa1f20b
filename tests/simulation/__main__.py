"""Replay one simulation with its trace: `python -m tests.simulation --seed 4711`, or run many."""

import argparse
import sys
import time
from dataclasses import dataclass

from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.world import FAILURES, World


@dataclass(frozen=True)
class Kind:
    """What is simulated; see `World`."""

    wide: bool
    parts: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1, help="run so many seeds without a trace")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="with this bug put in")
    parser.add_argument("--wide", action="store_true", help="with all parts and all faults")
    parser.add_argument("--parts", action="store_true", help="ranks hold parts of the weights")
    chosen = parser.parse_args(arguments)
    kind = Kind(chosen.wide, chosen.parts)
    with mutated(chosen.mutation):
        if chosen.count == 1:
            return _replay(chosen.seed, kind)
        return _sweep(range(chosen.seed, chosen.seed + chosen.count), kind)


def replay_of(seed: int, *, wide: bool = False, parts: bool = False) -> str:
    """The command that shows a failure again."""
    return f"make sim SEED={seed}{' WIDE=1' if wide else ''}{' PARTS=1' if parts else ''}"


def _replay(seed: int, kind: Kind) -> int:
    try:
        stats = World(seed, trace=print, wide=kind.wide, parts=kind.parts).run()
    except FAILURES as error:
        print(f"\nseed {seed} failed: {error}")
        return 1
    print(f"\nseed {seed} came to rest: {stats}")
    return 0


def _sweep(seeds: range, kind: Kind) -> int:
    failed = 0
    started = time.process_time()
    for seed in seeds:
        try:
            World(seed, wide=kind.wide, parts=kind.parts).run()
        except FAILURES as error:
            failed += 1
            print(f"{replay_of(seed, wide=kind.wide, parts=kind.parts)}    {error}", flush=True)
    each_s = (time.process_time() - started) / len(seeds)
    print(f"{failed} of {len(seeds)} seeds failed")
    print(f"{each_s:.3f} s of processor time per seed: {3600 / each_s:,.0f} an hour on one core")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

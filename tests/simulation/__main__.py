"""Replay one simulation with its trace: `python -m tests.simulation --seed 4711`, or run many."""

import argparse
import sys
import time

from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.world import FAILURES, World


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1, help="run so many seeds without a trace")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="with this bug put in")
    chosen = parser.parse_args(arguments)
    with mutated(chosen.mutation):
        if chosen.count == 1:
            return _replay(chosen.seed)
        return _sweep(range(chosen.seed, chosen.seed + chosen.count))


def _replay(seed: int) -> int:
    try:
        stats = World(seed, trace=print).run()
    except FAILURES as error:
        print(f"\nseed {seed} failed: {error}")
        return 1
    print(f"\nseed {seed} came to rest: {stats}")
    return 0


def _sweep(seeds: range) -> int:
    failed = 0
    started = time.perf_counter()
    for seed in seeds:
        try:
            World(seed).run()
        except FAILURES as error:
            failed += 1
            print(f"make sim SEED={seed}    {error}")
    took_s = time.perf_counter() - started
    print(f"{failed} of {len(seeds)} seeds failed, {took_s / len(seeds):.3f} s per seed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Replay one simulation with its trace: `python -m tests.simulation --seed 4711`, or run many.

Many on all cores: `python -m tests.simulation --seed 1000 --count 10000 --jobs 16 [--wide]`.
"""

import argparse
import sys

from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.sweep import Kind, sweep, world_of
from tests.simulation.world import FAILURES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1, help="run so many seeds without a trace")
    parser.add_argument("--jobs", type=int, default=1, help="run them in so many processes")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="with this bug put in")
    parser.add_argument("--wide", action="store_true", help="with all parts and all faults")
    parser.add_argument("--parts", action="store_true", help="ranks hold parts of the weights")
    parser.add_argument("--borrow", action="store_true", help="and borrow the parts they lack")
    parser.add_argument("--precopy", action="store_true", help="KV is copied before groups leave")
    parser.add_argument("--pipelines", action="store_true", help="some groups have stages")
    parser.add_argument("--calm", action="store_true", help="nothing breaks but processes")
    chosen = parser.parse_args(arguments)
    kind = Kind(
        chosen.wide,
        chosen.parts or chosen.borrow,
        chosen.borrow,
        chosen.precopy,
        chosen.pipelines,
        chosen.calm,
        chosen.mutation,
    )
    if chosen.count == 1:
        return _replay(chosen.seed, kind)
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    return int(sweep(seeds, kind, chosen.jobs) > 0)


def _replay(seed: int, kind: Kind) -> int:
    try:
        with mutated(kind.mutation):
            stats = world_of(seed, kind, trace=print).run()
    except FAILURES as error:
        print(f"\nseed {seed} failed: {error}")
        return 1
    print(f"\nseed {seed} came to rest: {stats}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the policy loses requests to the best fixed layout of a load; by hand, for its diagnosis.

python -m tests.simulation.policy_losses 0 200 tells of each load below 97 % of the best fixed
layout which requests missed a goal with the policy alone: of which tier and phase, which goal, in
which layout they came, and how many of them a switch stopped. Seeds may be given one by one instead
of a range: `28 59 172 -`.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from tests.simulation.policy_runs import FIXED, GRACE_S, SETTINGS, box_of, good, simulate
from tests.simulation.policy_shapes import Phase, any_shape, arrivals
from tools.simulator.cell import RequestTimes, Run, is_good

BOUND = 0.97


def missed(seen: RequestTimes) -> str:
    """Say which goal a request missed."""
    goal = SETTINGS.goals[seen.tier]
    if seen.first_s is None or (goal.ttft_s is not None and (seen.ttft_s or 0.0) > goal.ttft_s):
        return "first token"
    return "unfinished" if seen.end_s is None else "time per token"


def losses(run: Run, best: Run) -> list[RequestTimes]:
    """Return what was seen of requests that met their goals in `best` and not in `run`."""
    met = {_key(each) for each in best.requests if is_good(each, SETTINGS)}
    return [each for each in run.requests if _key(each) in met and not is_good(each, SETTINGS)]


def layout_at(run: Run, at_s: float, first: str = "dp4") -> str:
    """Return the arrangement that was wanted at a time."""
    return next((name for when, name, _ in reversed(run.switches) if when <= at_s), first)


def tell(seed: int, phases: Sequence[Phase]) -> None:
    """Print what one load loses."""
    load, costs = arrivals(phases, seed), box_of(seed)
    ends = list(accumulate(phase.seconds for phase in phases))
    fixed = {name: simulate(load, ends[-1] + GRACE_S, costs, name) for name in FIXED}
    run = simulate(load, ends[-1] + GRACE_S, costs, None)
    counts = {name: good(each) for name, each in fixed.items()}
    best = max(counts, key=counts.__getitem__)
    if good(run) >= BOUND * counts[best]:
        return
    print(f"seed {seed}: {good(run)} of {len(load)}; {counts}")
    for index, phase in enumerate(phases):
        parts = (
            f"{each.tier.name.lower()} {each.rate:.1f}/s of {each.prompt}+{each.output}"
            for each in phase.parts
        )
        print(f"  phase {index} until {ends[index]:.0f} s: {', '.join(parts)}")
    for at_s, name, reason in run.switches:
        print(f"  {at_s:6.2f} s {name}: {reason}")
    found: Counter[tuple[str, ...]] = Counter()
    for each in losses(run, fixed[best]):
        index = sum(end_s <= each.arrive_s for end_s in ends)
        stopped = any(
            each.arrive_s < at_s < (each.end_s or ends[-1]) for at_s, _, _ in run.switches
        )
        found[
            each.tier.name.lower(),
            missed(each),
            f"phase {index}",
            layout_at(run, each.arrive_s),
            "beside a switch" if stopped else "no switch",
        ] += 1
    for words, count in found.most_common():
        print(f"  lost {count}: {', '.join(words)}")
    print(f"  gained {len(losses(fixed[best], run))}")


def _key(seen: RequestTimes) -> tuple[float, int, int]:
    return seen.arrive_s, int(seen.tier), seen.output


def _seeds(words: Sequence[str]) -> Iterable[int]:
    if words[-1] == "-":
        return map(int, words[:-1])
    first, end = map(int, words)
    return range(first, end)


def main() -> None:
    """Print what is lost, load by load."""
    for seed in _seeds(sys.argv[1:]):
        tell(seed, any_shape(seed))


if __name__ == "__main__":
    main()

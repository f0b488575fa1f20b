"""The plan of a run: every request with its send time, tier and lengths, fixed before it starts.

Pure: the same inputs and seed give the same plan, whatever the server does. `loops` carries
the plan out; `report` compares what happened with it.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.arrivals import Arrival
from loadgen.errors import UsageError
from loadgen.lengths import Lengths, sample_tokens

MAX_TIERS = 16
TIER_SHAPE = re.compile(r"(?P<name>[\w.-]+)(?::(?P<weight>[^:]+))?")


@dataclass(frozen=True, slots=True)
class Mixture:
    """What requests look like: lengths, tiers with weights (none: no tier is sent), prefixes."""

    prompt: Lengths
    output: Lengths
    tiers: tuple[tuple[str, float], ...]
    prefix_groups: int
    shared_prefix_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send; `at_s` is None in a closed loop, where answers set the pace."""

    index: int
    request_id: str
    at_s: float | None
    phase_index: int
    tier: str | None
    prompt_tokens: int
    output_tokens: int
    prefix_group: int | None
    prefix_tokens: int

    @property
    def input_tokens(self) -> int:
        """Length of the whole prompt: the shared prefix and the request's own part."""
        return self.prefix_tokens + self.prompt_tokens


def parse_tiers(text: str) -> tuple[tuple[str, float], ...]:
    """Read `interactive:0.2,standard:0.6`; a missing weight is 1, weights need not sum to 1."""
    tiers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = TIER_SHAPE.fullmatch(part)
        weight = _weight(match["weight"] or "1") if match else None
        if match is None or weight is None:
            raise UsageError(
                f"Tier '{part}' does not look like NAME:WEIGHT with a weight above 0, "
                "for example interactive:0.2."
            )
        if match["name"] in tiers:
            raise UsageError(f"Tier '{match['name']}' is given twice.")
        tiers[match["name"]] = weight
    if len(tiers) > MAX_TIERS:
        raise UsageError(f"{len(tiers)} tiers are more than the limit of {MAX_TIERS}.")
    return tuple(tiers.items())


def plan_open(
    arrivals: Sequence[Arrival], mixture: Mixture, *, seed: int, run_id: str
) -> tuple[PlannedRequest, ...]:
    """One request for every arrival, in order of time."""
    rng = random.Random(f"{seed}/requests")
    return tuple(
        _plan_one(index, arrival, mixture, rng, run_id) for index, arrival in enumerate(arrivals)
    )


def plan_closed(
    requests: int, mixture: Mixture, *, seed: int, run_id: str
) -> tuple[PlannedRequest, ...]:
    """`requests` requests without send times, all in phase 0."""
    rng = random.Random(f"{seed}/requests")
    return tuple(_plan_one(index, None, mixture, rng, run_id) for index in range(requests))


def _plan_one(
    index: int, arrival: Arrival | None, mixture: Mixture, rng: random.Random, run_id: str
) -> PlannedRequest:
    # Every draw happens for every request, so turning one feature on does not shift the others.
    tier_draw, group_draw = rng.random(), rng.random()
    return PlannedRequest(
        index=index,
        request_id=f"{run_id}-{index}",
        at_s=None if arrival is None else arrival.at_s,
        phase_index=0 if arrival is None else arrival.phase_index,
        tier=_pick_tier(mixture.tiers, tier_draw),
        prompt_tokens=sample_tokens(mixture.prompt, rng),
        output_tokens=sample_tokens(mixture.output, rng),
        prefix_group=int(group_draw * mixture.prefix_groups) if mixture.prefix_groups else None,
        prefix_tokens=mixture.shared_prefix_tokens if mixture.prefix_groups else 0,
    )


def _pick_tier(tiers: Sequence[tuple[str, float]], draw: float) -> str | None:
    if not tiers:
        return None
    left = draw * sum(weight for _, weight in tiers)
    for name, weight in tiers:
        left -= weight
        if left < 0:
            return name
    return tiers[-1][0]


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if math.isfinite(weight) and weight > 0 else None

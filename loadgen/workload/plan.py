"""The plan of a run: every request with its send time, tier and lengths, fixed before it starts.

Pure: the same inputs and seed give the same plan, whatever the server does. `loops` carries the
plan out; `report` compares the outcome with it. `digest_of` names a plan in a few letters, so that
two reports can show that they are about the same requests.
"""

import hashlib
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadgen.errors import UsageError
from loadgen.workload.arrivals import MAX_PLANNED_REQUESTS, Arrival
from loadgen.workload.lengths import Lengths, sample_tokens, scaled_tokens
from loadgen.workload.traces import TraceRow

MAX_TIERS = 16
DIGEST_CHARS = 16
TIER_SHAPE = re.compile(r"(?P<name>[\w.-]+)(?::(?P<weight>[^:]+))?")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations, as coding agents have them: arrivals are those of sessions, not of requests.

    The first turn brings a task, each later one the result of a tool (`tool`, tokens) after the
    whole history. It is sent `think_s` seconds (the mean of an exponential) after the answer before
    it ended.
    """

    turns: Lengths
    tool: Lengths
    think_s: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """The form of requests: lengths, tiers with weights (none: no tier is sent), prefixes."""

    prompt: Lengths
    output: Lengths
    tiers: tuple[tuple[str, float], ...]
    prefix_groups: int
    shared_prefix_tokens: int
    sessions: Sessions | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of request in a workload, drawn in proportion to its weight.

    `phases` holds the indexes of the phases that have it; None means all of them.
    """

    weight: float
    mixture: Mixture
    phases: frozenset[int] | None = None

    def weight_in(self, phase_index: int) -> float:
        """Return the weight in a phase."""
        return self.weight if self.phases is None or phase_index in self.phases else 0.0


Workload = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send; `at_s` is None where an answer sets the pace.

    That is in a closed loop, and for every turn of a session but its first (`turn` 0): such a turn
    is due `think_s` after the end of the answer before it. `history_tokens` is the planned length
    of the session's earlier turns and answers.
    """

    index: int
    request_id: str
    at_s: float | None
    phase_index: int
    tier: str | None
    prompt_tokens: int
    output_tokens: int
    prefix_group: int | None
    prefix_tokens: int
    session: str | None = None
    turn: int = 0
    think_s: float = 0.0
    history_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """Length of the whole prompt: the shared prefix, the history and the request's own part."""
        return self.prefix_tokens + self.history_tokens + self.prompt_tokens


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
    arrivals: Sequence[Arrival], workload: Workload, *, seed: int, run_id: str
) -> tuple[PlannedRequest, ...]:
    """Plan one request, or the turns of one session, for every arrival, in order of arrival.

    Raises `UsageError` if the sessions have more than `MAX_PLANNED_REQUESTS` turns in all.
    """
    planner = _Planner(workload, seed, run_id)
    plan: list[PlannedRequest] = []
    for arrival in arrivals:
        plan += planner.plan(len(plan), arrival)
        if len(plan) > MAX_PLANNED_REQUESTS:
            raise UsageError(
                f"The sessions have more than {MAX_PLANNED_REQUESTS} turns in all: make the run "
                "shorter or lower --rate-scale."
            )
    return tuple(plan)


def plan_closed(
    requests: int, workload: Workload, *, seed: int, run_id: str
) -> tuple[PlannedRequest, ...]:
    """Plan `requests` requests without send times, all in phase 0; of a session its first turn."""
    planner = _Planner(workload, seed, run_id)
    return tuple(planner.plan(index, None)[0] for index in range(requests))


def plan_trace(
    rows: Sequence[TraceRow], workload: Workload, *, length_scale: float, seed: int, run_id: str
) -> tuple[PlannedRequest, ...]:
    """Plan one request for every row, with the row's time and lengths and the workload's tiers."""
    planned = plan_open([Arrival(row.at_s, 0) for row in rows], workload, seed=seed, run_id=run_id)
    return tuple(
        replace(
            each,
            prompt_tokens=scaled_tokens(row.prompt_tokens, length_scale),
            output_tokens=scaled_tokens(row.output_tokens, length_scale),
        )
        for each, row in zip(planned, rows, strict=True)
    )


def digest_of(plan: Sequence[PlannedRequest], style: object) -> str:
    """Return a digest that is equal for runs with the same requests at the same times.

    `style` holds everything else that decides the prompts' text; its `repr` is included. Request
    ids are not, because they contain the run's id.
    """
    digest = hashlib.sha256(repr(style).encode())
    for planned in plan:
        # Without the fields that only later turns have: reports from before them keep their digest.
        text = repr(replace(planned, request_id="")).replace("turn=0, think_s=0.0, ", "")
        digest.update(text.encode())
    return digest.hexdigest()[:DIGEST_CHARS]


class _Planner:
    """Draws requests and sessions one after another."""

    def __init__(self, workload: Workload, seed: int, run_id: str) -> None:
        self._workload = workload
        self._run_id = run_id
        # Separate streams: a plan of one part without sessions does not depend on these draws.
        self._parts = random.Random(f"{seed}/parts")
        self._sessions = random.Random(f"{seed}/sessions")
        self._requests = random.Random(f"{seed}/requests")

    def plan(self, index: int, arrival: Arrival | None) -> list[PlannedRequest]:
        """Return the request of an arrival, with this index, or its session's turns from it on."""
        phase_index = 0 if arrival is None else arrival.phase_index
        weights = [part.weight_in(phase_index) for part in self._workload]
        (kind,) = self._parts.choices(range(len(weights)), weights)
        mixture, rng = self._workload[kind].mixture, self._requests
        # Every draw happens for every request, so turning one feature on does not shift the others.
        tier_draw, group_draw = rng.random(), rng.random()
        first = PlannedRequest(
            index=index,
            request_id=f"{self._run_id}-{index}",
            at_s=None if arrival is None else arrival.at_s,
            phase_index=phase_index,
            tier=_pick_tier(mixture.tiers, tier_draw),
            prompt_tokens=sample_tokens(mixture.prompt, rng),
            output_tokens=sample_tokens(mixture.output, rng),
            prefix_group=int(group_draw * mixture.prefix_groups) if mixture.prefix_groups else None,
            prefix_tokens=mixture.shared_prefix_tokens if mixture.prefix_groups else 0,
        )
        if mixture.sessions is None:
            return [first]
        return self._turns(replace(first, session=f"s{index}"), mixture, mixture.sessions)

    def _turns(
        self, first: PlannedRequest, mixture: Mixture, sessions: Sessions
    ) -> list[PlannedRequest]:
        """Return all turns of the session that `first` opens."""
        rng = self._sessions
        turns = [first]
        for turn in range(1, sample_tokens(sessions.turns, rng)):
            index, before = first.index + turn, turns[-1]
            turns.append(
                replace(
                    first,
                    index=index,
                    request_id=f"{self._run_id}-{index}",
                    at_s=None,
                    turn=turn,
                    think_s=rng.expovariate(1 / sessions.think_s),
                    prompt_tokens=sample_tokens(sessions.tool, rng),
                    output_tokens=sample_tokens(mixture.output, rng),
                    history_tokens=before.history_tokens
                    + before.prompt_tokens
                    + before.output_tokens,
                )
            )
        return turns


def _pick_tier(tiers: Sequence[tuple[str, float]], draw: float) -> str | None:
    if not tiers:
        return None
    remaining = draw * sum(weight for _, weight in tiers)
    for name, weight in tiers:
        remaining -= weight
        if remaining < 0:
            return name
    return tiers[-1][0]


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if math.isfinite(weight) and weight > 0 else None

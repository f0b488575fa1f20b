"""When requests are sent: phases of constant rate, turned into a list of send times.

Pure: the same phases, kind and seed give the same times. Each phase draws from its own random
stream, so changing one phase leaves the arrivals inside the others unchanged. Times are seconds
since the start of the run; `plan` turns them into requests.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from loadgen.errors import UsageError

MAX_PLANNED_REQUESTS = 200_000
MAX_RUN_S = 24 * 3600.0
MAX_PHASES = 1_000
# Prevents ceil(rate * duration) from counting one request too many for an inexact product.
COUNT_SLACK_REQUESTS = 1e-9

PHASE_SHAPE = re.compile(r"(?P<name>[\w.-]+):(?P<rate>[^:/]+)/(?P<per>s|m):(?P<duration>[^:]+)")
DURATION_SHAPE = re.compile(r"(?P<number>[0-9.eE+-]+)(?P<unit>ms|s|m|h)?")
UNIT_S = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}


class ArrivalKind(StrEnum):
    """How send times are distributed inside a phase."""

    POISSON = "poisson"
    UNIFORM = "uniform"
    BURST = "burst"


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run with one mean rate (requests per second; 0 means idle)."""

    name: str
    rate_per_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One send time, in seconds since the start of the run, and its phase."""

    at_s: float
    phase_index: int


def parse_phases(text: str, *, cycles: int = 1) -> tuple[Phase, ...]:
    """Read `NAME:RATE/s:DURATION,...`, repeated `cycles` times, with unique names."""
    if cycles < 1:
        raise UsageError(f"--cycles must be at least 1, not {cycles}.")
    once = [_parse_phase(part.strip()) for part in text.split(",")]
    if len(once) * cycles > MAX_PHASES:
        raise UsageError(f"{len(once) * cycles} phases are more than the limit of {MAX_PHASES}.")
    return check_phases(_with_unique_names(once * cycles))


def parse_duration_s(text: str) -> float:
    """Read `20s`, `500ms`, `2m`, `1h` or a plain number of seconds."""
    match = DURATION_SHAPE.fullmatch(text.strip())
    number = _positive_or_zero(match["number"]) if match else None
    if match is None or number is None or number == 0:
        raise UsageError(f"'{text}' is not a duration; write for example 20s, 500ms or 2m.")
    return number * UNIT_S[match["unit"]]


def check_phases(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Refuse phases that send nothing or exceed the named limits."""
    total_s = sum(phase.duration_s for phase in phases)
    expected = sum(phase.rate_per_s * phase.duration_s for phase in phases)
    if total_s > MAX_RUN_S:
        raise UsageError(f"A run of {total_s:.0f} s is over the limit of {MAX_RUN_S:.0f} s.")
    if expected > MAX_PLANNED_REQUESTS:
        raise UsageError(
            f"The phases ask for about {expected:.0f} requests, over the limit of "
            f"{MAX_PLANNED_REQUESTS}."
        )
    if expected == 0:
        raise UsageError("The phases send no request at all; give at least one a rate above 0.")
    return tuple(phases)


def scaled_phases(
    phases: Sequence[Phase], *, rate_scale: float, duration_s: float | None
) -> tuple[Phase, ...]:
    """Return the phases at `rate_scale` times their rates, stretched to `duration_s` in all.

    Each phase keeps its share of the time; without a duration, lengths stay the same. Limits are
    checked again.
    """
    total_s = sum(phase.duration_s for phase in phases)
    stretch = 1.0 if duration_s is None else duration_s / total_s
    return check_phases(
        [
            replace(
                phase,
                rate_per_s=phase.rate_per_s * rate_scale,
                duration_s=phase.duration_s * stretch,
            )
            for phase in phases
        ]
    )


def phase_starts_s(phases: Sequence[Phase]) -> tuple[float, ...]:
    """Return the start of every phase, in seconds since the start of the run."""
    starts, now_s = [], 0.0
    for phase in phases:
        starts.append(now_s)
        now_s += phase.duration_s
    return tuple(starts)


def plan_arrivals(
    phases: Sequence[Phase], kind: ArrivalKind, *, seed: int, burst_requests: int = 8
) -> tuple[Arrival, ...]:
    """Return every send time of the run, in order; times lie in [phase start, phase end)."""
    arrivals: list[Arrival] = []
    for index, (phase, start_s) in enumerate(zip(phases, phase_starts_s(phases), strict=True)):
        rng = random.Random(f"{seed}/arrivals/{index}")
        offsets_s = _offsets_s(phase, kind, rng, burst_requests)
        arrivals.extend(Arrival(start_s + offset_s, index) for offset_s in offsets_s)
    return tuple(arrivals)


def _offsets_s(
    phase: Phase, kind: ArrivalKind, rng: random.Random, burst_requests: int
) -> Iterator[float]:
    if phase.rate_per_s == 0:
        return iter(())
    match kind:
        case ArrivalKind.POISSON:
            return _poisson_offsets_s(phase, rng)
        case ArrivalKind.UNIFORM:
            return _grouped_offsets_s(phase, 1)
        case ArrivalKind.BURST:
            return _grouped_offsets_s(phase, burst_requests)


def _poisson_offsets_s(phase: Phase, rng: random.Random) -> Iterator[float]:
    offset_s = rng.expovariate(phase.rate_per_s)
    while offset_s < phase.duration_s:
        yield offset_s
        offset_s += rng.expovariate(phase.rate_per_s)


def _grouped_offsets_s(phase: Phase, group_requests: int) -> Iterator[float]:
    """Yield groups that arrive together, evenly spaced so that the mean is the phase's rate."""
    count = math.ceil(phase.rate_per_s * phase.duration_s - COUNT_SLACK_REQUESTS)
    for index in range(count):
        yield (index // group_requests) * group_requests / phase.rate_per_s


def _parse_phase(part: str) -> Phase:
    match = PHASE_SHAPE.fullmatch(part)
    if match is None:
        raise UsageError(
            f"Phase '{part}' does not look like NAME:RATE/s:DURATION, for example low:2/s:20s."
        )
    rate = _positive_or_zero(match["rate"])
    if rate is None:
        raise UsageError(f"Phase '{part}' has a rate that is not a number of 0 or more.")
    return Phase(match["name"], rate / UNIT_S[match["per"]], parse_duration_s(match["duration"]))


def _positive_or_zero(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _with_unique_names(phases: Sequence[Phase]) -> list[Phase]:
    """Rename `low, high, low` to `low, high, low#2`, so that reports can name each phase."""
    counts: dict[str, int] = {}
    unique = []
    for phase in phases:
        counts[phase.name] = counts.get(phase.name, 0) + 1
        count = counts[phase.name]
        unique.append(phase if count == 1 else replace(phase, name=f"{phase.name}#{count}"))
    return unique

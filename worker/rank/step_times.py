"""Step times by token count in each mode of a width, and where sp overtakes tp.

Measured at start-up, because the crossing depends on model, device and links: sp reads all weights
in every step but sends 1/k of what tp reduces, so it wins above some token count (Shift
Parallelism, algorithm 3; the paper sets that threshold by hand). Pure; the leader of a group asks
before each step. No hysteresis: changing the mode between two steps costs nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from comm_pool.layout import Mode, StepMode, step_name
from comm_pool.mixed import Mixed
from coordinator.protocol.messages.steps import WidthTimes

MARGIN = 0.02
"""Minimum relative gain of sp over tp: measurements differ by about as much between runs."""

LAUNCH_MARGIN = 0.3
"""The same where tp replays graphs.

sp's launches may take that much longer than measured, on a host that was asleep or is busy.
"""

SURELY_ABOVE = 1.2
"""A step that takes at least this multiple of its floor is as long as its computation."""

PACE = 1.5
"""Tokens of a step over those that compute for just as long as the loans take.

Near that size loans and computation wait for each other: on H200s steps of 768 tokens take 11 %
longer per token than those of 8,192, and steps of 1,024 tokens 4 %.
"""


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Microseconds of a step by tokens, linear between measured points and beyond the last.

    `points` are (tokens, µs), tokens ascending; at least one.
    """

    points: tuple[tuple[int, int], ...]

    def us(self, tokens: int) -> float:
        """Return the time of a step of `tokens` tokens; below the first point, the first time."""
        first, *_ = self.points
        if tokens <= first[0] or len(self.points) == 1:
            return float(first[1])
        after = min(bisect_left(self.points, (tokens, 0)), len(self.points) - 1)
        (low, low_us), (high, high_us) = self.points[after - 1], self.points[after]
        return low_us + (high_us - low_us) * (tokens - low) / (high - low)


def fitted(medians: Mapping[int, float]) -> StepCurve:
    """Return the non-decreasing curve through the medians of repeated measurements.

    `medians` maps tokens to seconds. More tokens cannot take less time, so falling medians are
    noise, and neighbours are averaged (isotonic regression by pooling adjacent violators).
    """
    pools: list[list[float]] = []
    for tokens in sorted(medians):
        pools.append([medians[tokens] * 1e6, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, count = pools.pop()
            before, many = pools.pop()
            pools.append([(value * count + before * many) / (count + many), count + many])
    values = [value for value, count in pools for _ in range(int(count))]
    return StepCurve(
        tuple((tokens, round(us)) for tokens, us in zip(sorted(medians), values, strict=True))
    )


def crossing(tp: StepCurve, sp: StepCurve, graphed_tokens: int = 0) -> int | None:
    """Return the fewest tokens from which sp stays faster in all measurements; None if never.

    A single win of sp below a size where it loses does not count: small steps scatter most.
    """

    def is_faster(tokens: int) -> bool:
        margin = LAUNCH_MARGIN if tokens <= graphed_tokens else MARGIN
        return sp.us(tokens) < tp.us(tokens) * (1 - margin)

    sizes = sorted({tokens for curve in (tp, sp) for tokens, _ in curve.points})
    if not is_faster(sizes[-1]):
        return None
    loses = max((each for each in sizes if not is_faster(each)), default=0)
    wins = min(each for each in sizes if each > loses)
    # Both curves are linear between two sizes, so they cross once.
    while wins - loses > 1:
        middle = (wins + loses) // 2
        if is_faster(middle):
            wins = middle
        else:
            loses = middle
    return wins


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The measurements for one width, by mode of a step.

    Wide groups have tp, and sp and mixed modes where available. In tp every step of at most
    `graphed_tokens` tokens replays a graph.
    """

    width: int
    curves: Mapping[StepMode, StepCurve]
    graphed_tokens: int = 0
    floor_us: Mapping[StepMode, int] = field(default_factory=dict)
    """The least time of a step in each mode that borrows, in microseconds: its loans alone."""
    pace_tokens: Mapping[StepMode, int] = field(default_factory=dict)
    """How large prompts make steps beside decodes, in each mode whose loans hide."""

    def plus(self, other: "StepTimes") -> "StepTimes":
        """Return these times with the curves of other modes of the same width."""
        return replace(self, curves={**self.curves, **other.curves})

    @property
    def sp_from_tokens(self) -> int | None:
        """The fewest tokens that a shift group computes in sp; None is never."""
        return self.from_tokens(Mode.SP)

    def from_tokens(self, base: StepMode) -> int | None:
        """Return the same for a shift group that chooses between tp and this mode."""
        if base not in self.curves:
            return None
        return crossing(self.curves[Mode.TP], self.curves[base], self.graphed_tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """The measured modes, as layouts write them."""
        return tuple(step_name(mode, self.width) for mode in self.curves)

    @property
    def mixed(self) -> tuple[Mixed, ...]:
        """The mixed shapes of this width."""
        return tuple(mode for mode in self.curves if isinstance(mode, Mixed))


def pace_tokens(
    points: Sequence[tuple[int, int]], floor_us: int, graph_sizes: Sequence[int] = ()
) -> int | None:
    """Return how many tokens a step needs so that its loans cost it nothing.

    `points` are the measured (tokens, µs) of steps that borrow, tokens ascending. The computation
    is a line through the first two points that are surely above the floor, or through one and the
    origin. A step that replays a graph takes the time of the graph's size, one of `graph_sizes`,
    so the pace is one of these up to the largest. None if a step of few tokens is above the floor
    already: nothing hides there, as on CPU, where loans and computation take turns.
    """
    above = [each for each in points if each[1] >= SURELY_ABOVE * floor_us]
    below = points[: len(points) - len(above)]
    if not floor_us or not above or not below:
        return None
    (few, few_us), (more, more_us) = [(0, 0), *above][:2] if len(above) == 1 else above[:2]
    us_per_token = (more_us - few_us) / (more - few)
    if us_per_token <= 0:
        return None
    hides = more - (more_us - floor_us) / us_per_token
    if hides < max(1, below[-1][0] / 2):
        return None
    tokens = int(PACE * hides)
    return next((size for size in sorted(graph_sizes) if size >= tokens), tokens)


def sizes_to_measure(
    tokens_max: int, modes: Iterable[StepMode], *, all_sizes: bool = False
) -> tuple[int, ...]:
    """Return the step sizes to time: powers of four up to the largest scheduled step.

    Steps of two where sp usually overtakes tp. Without a choice of modes both ends suffice, plus a
    large batch of decodes if the largest is far away: their tokens cost less than a prompt's. Not
    so with `all_sizes`, for modes whose times are flat up to some size, or are compared with those
    of a mode that has all sizes: a line through other sizes lies elsewhere.
    """
    ladder = [1, 4, 16, 64, 256, 1024, 2048, 4096, 16384]
    inside = [size for size in ladder if size < tokens_max]
    if all_sizes or any(mode not in (Mode.DP, Mode.TP) for mode in modes):
        return (*inside, tokens_max)
    return (1, 256, tokens_max) if tokens_max > 1024 else (*inside[:1], tokens_max)


def chosen_parts(
    sizes: Sequence[int], parts: Sequence[int], seconds: Sequence[Sequence[float]]
) -> tuple[tuple[int, int], ...]:
    """Return (tokens, parts) per size, ascending: the fewest parts close to the fastest.

    `seconds` are the times of each size with each number of exchange parts.
    """
    found = []
    for size, row in zip(sizes, seconds, strict=True):
        near = min(row) * (1 + MARGIN)
        found.append(
            (size, min(each for each, took in zip(parts, row, strict=True) if took <= near))
        )
    return tuple(found)


def width_times(times: StepTimes) -> WidthTimes:
    """Return the times as a rank reports them to the coordinator."""
    curves = tuple((str(mode), curve.points) for mode, curve in times.curves.items())
    mixed = tuple((str(each), times.from_tokens(each)) for each in times.mixed)
    floors = tuple((str(mode), us) for mode, us in times.floor_us.items() if us > 0)
    paces = tuple((str(mode), tokens) for mode, tokens in times.pace_tokens.items())
    return WidthTimes(times.width, curves, times.sp_from_tokens, mixed, floors, paces)

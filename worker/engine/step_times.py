"""How long a step takes by its tokens, in each mode of a width, and where sp overtakes tp.

Measured at start-up, because the crossing depends on model, device and links: sp reads all weights
in every step but sends 1/k of what tp reduces, so it wins from some number of tokens on (Shift
Parallelism, algorithm 3; the paper sets that threshold by hand). Pure; the leader of a group asks
before each step. There is no hysteresis, because changing the mode between two steps costs nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from comm_pool.layout import Mode, StepMode, step_name
from comm_pool.mixed import Mixed
from coordinator.protocol.messages.steps import WidthTimes

MARGIN = 0.02
"""sp has to be so much faster, in parts: measurements differ by about as much from run to run."""

LAUNCH_MARGIN = 0.3
"""The same where tp replays graphs: sp's launches take up to so much longer than when they were
measured, on a host that slept before or is busy."""


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Microseconds of a step by its tokens: straight between measured points, and beyond them.

    `points` are (tokens, µs), tokens ascending; at least one.
    """

    points: tuple[tuple[int, int], ...]

    def us(self, tokens: int) -> float:
        """The time of a step of so many tokens; below the first point that of the first."""
        first, *_ = self.points
        if tokens <= first[0] or len(self.points) == 1:
            return float(first[1])
        after = min(bisect_left(self.points, (tokens, 0)), len(self.points) - 1)
        (left, left_us), (right, right_us) = self.points[after - 1], self.points[after]
        return left_us + (right_us - left_us) * (tokens - left) / (right - left)


def fitted(samples: Mapping[int, Sequence[float]]) -> StepCurve:
    """The curve through the medians of repeated measurements, tokens -> seconds, never falling.

    A step of more tokens cannot be sooner done, so where medians fall, noise has made them, and
    neighbours are averaged (isotonic regression by pooling adjacent violators).
    """
    pools: list[list[float]] = []
    for tokens in sorted(samples):
        pools.append([median(samples[tokens]) * 1e6, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, count = pools.pop()
            before, many = pools.pop()
            pools.append([(value * count + before * many) / (count + many), count + many])
    values = [value for value, count in pools for _ in range(int(count))]
    return StepCurve(
        tuple((tokens, round(us)) for tokens, us in zip(sorted(samples), values, strict=True))
    )


def crossing(tp: StepCurve, sp: StepCurve, graphed_tokens: int = 0) -> int | None:
    """The fewest tokens from which sp stays faster, as far as was measured; None if it never is.

    A single win of sp below a size where it loses does not count: steps of few tokens are those
    whose measurements scatter most.
    """

    def is_faster(tokens: int) -> bool:
        margin = LAUNCH_MARGIN if tokens <= graphed_tokens else MARGIN
        return sp.us(tokens) < tp.us(tokens) * (1 - margin)

    sizes = sorted({tokens for curve in (tp, sp) for tokens, _ in curve.points})
    if not is_faster(sizes[-1]):
        return None
    loses = max((each for each in sizes if not is_faster(each)), default=0)
    wins = min(each for each in sizes if each > loses)
    # Between two sizes both curves are straight, so they cross once.
    while wins - loses > 1:
        middle = (wins + loses) // 2
        if is_faster(middle):
            wins = middle
        else:
            loses = middle
    return wins


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What was measured for one width, by mode of a step.

    Wide groups have tp, and sp and mixed ones where they are there. In tp every step of up to
    `graphed_tokens` replays a graph.
    """

    width: int
    curves: Mapping[StepMode, StepCurve]
    graphed_tokens: int = 0

    @property
    def sp_from_tokens(self) -> int | None:
        """From how many tokens on a shift group computes a step in sp; None is never."""
        return self.from_tokens(Mode.SP)

    def from_tokens(self, base: StepMode) -> int | None:
        """The same of a shift group that chooses between tp and this mode."""
        if base not in self.curves:
            return None
        return crossing(self.curves[Mode.TP], self.curves[base], self.graphed_tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """What was measured, as layouts write it."""
        return tuple(step_name(mode, self.width) for mode in self.curves)

    @property
    def mixed(self) -> tuple[Mixed, ...]:
        """The mixed shapes of this width."""
        return tuple(mode for mode in self.curves if isinstance(mode, Mixed))


def sizes_to_measure(tokens_max: int, modes: Iterable[StepMode]) -> tuple[int, ...]:
    """Which steps are timed: by fours up to the largest that is ever scheduled.

    By twos where sp usually overtakes tp. Where there is nothing to choose, the two ends do, and
    where the last is far away a large batch of decodes, whose tokens cost less than a prompt's.
    """
    ladder = [1, 4, 16, 64, 256, 1024, 2048, 4096, 16384]
    inside = [size for size in ladder if size < tokens_max]
    if any(mode not in (Mode.DP, Mode.TP) for mode in modes):
        return (*inside, tokens_max)
    return (1, 256, tokens_max) if tokens_max > 1024 else (*inside[:1], tokens_max)


def chosen_parts(
    sizes: Sequence[int], parts: Sequence[int], seconds: Sequence[Sequence[float]]
) -> tuple[tuple[int, int], ...]:
    """Return (tokens, parts) for each size, ascending: the fastest, or the fewest next to it.

    `seconds` are those of each size in each number of parts that its exchange may fall into.
    """
    found = []
    for size, row in zip(sizes, seconds, strict=True):
        near = min(row) * (1 + MARGIN)
        found.append(
            (size, min(each for each, took in zip(parts, row, strict=True) if took <= near))
        )
    return tuple(found)


def told(times: StepTimes) -> WidthTimes:
    """As a rank tells it to the coordinator."""
    curves = tuple((str(mode), curve.points) for mode, curve in times.curves.items())
    mixed = tuple((str(each), times.from_tokens(each)) for each in times.mixed)
    return WidthTimes(times.width, curves, times.sp_from_tokens, mixed)

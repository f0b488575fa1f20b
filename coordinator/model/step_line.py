"""A fitted line for step times: T = A + B·tokens + C·context.

Least squares of relative errors, so a decode of 10 ms counts as much as a prefill of a second.
Leaders report only the sums of the normal equations, and a factor fades old ones. A, B and C are
never negative. The cost model calls this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from coordinator.protocol.messages.steps import StepSums

TOKENS_UNIT = 1_000.0
CONTEXT_UNIT = 1_000_000.0
"""Sums are in these units, so that the equations are well conditioned."""

SINGULAR = 1e-9


@dataclass(frozen=True, slots=True)
class StepLine:
    """Seconds of a step: fixed, per computed token, and per token of context that is read."""

    base_s: float
    token_s: float
    context_s: float

    def seconds(self, tokens: float, context: float) -> float:
        """The time of a step that computes `tokens` and reads the KV of `context` tokens."""
        return self.base_s + self.token_s * tokens + self.context_s * context


def sums_of(steps: Iterable[tuple[float, float, float]], weight: float = 1.0) -> StepSums:
    """Return the sums of (tokens, context, seconds) steps, each weighing `weight`."""
    total = StepSums()
    for tokens, context, seconds in steps:
        total = plus(total, _of_one(tokens, context, seconds, weight))
    return total


def plus(first: StepSums, second: StepSums, keep: float = 1.0) -> StepSums:
    """Return the sum of both; `first` is weighted by `keep`."""
    return StepSums(
        *(
            keep * getattr(first, name) + getattr(second, name)
            for name in StepSums.__struct_fields__
        )
    )


def scaled(sums: StepSums, factor: float) -> StepSums:
    """Return the sums of the same steps, had each taken `factor` times as long."""
    weight = 1 / (factor * factor)
    longer = {name: getattr(sums, name) * weight for name in ("n", "t", "c", "tt", "tc", "cc")}
    times = {name: getattr(sums, name) / factor for name in ("y", "ty", "cy")}
    return StepSums(**longer, **times, steps=sums.steps)


def mean_ratio(line: StepLine, sums: StepSums) -> float:
    """Return the mean of the line's time over the real time, of the steps of `sums`."""
    predicted = (
        line.base_s * sums.y
        + line.token_s * TOKENS_UNIT * sums.ty
        + line.context_s * CONTEXT_UNIT * sums.cy
    )
    return predicted / sums.steps


def fit(sums: StepSums) -> StepLine | None:
    """Return the best line with no negative part; None if there is nothing to fit.

    With three unknowns the non-negative optimum is the best of the unconstrained optima over every
    subset of them that come out non-negative.
    """
    matrix = (
        (sums.n, sums.t, sums.c),
        (sums.t, sums.tt, sums.tc),
        (sums.c, sums.tc, sums.cc),
    )
    target = (sums.y, sums.ty, sums.cy)
    best: tuple[float, StepLine] | None = None
    for size in (3, 2, 1):
        for used in combinations(range(3), size):
            solved = _solve([[matrix[i][j] for j in used] for i in used], [target[i] for i in used])
            if solved is None or min(solved) < 0:
                continue
            parts = [0.0, 0.0, 0.0]
            for index, value in zip(used, solved, strict=True):
                parts[index] = value
            # Only this part of the squared error depends on the line.
            error = -sum(target[index] * parts[index] for index in used)
            if best is None or error < best[0] - SINGULAR:
                best = error, StepLine(parts[0], parts[1] / TOKENS_UNIT, parts[2] / CONTEXT_UNIT)
    return best[1] if best else None


def _of_one(tokens: float, context: float, seconds: float, weight: float) -> StepSums:
    if seconds <= 0:
        return StepSums()
    w = weight / (seconds * seconds)
    t, c = tokens / TOKENS_UNIT, context / CONTEXT_UNIT
    return StepSums(
        n=w,
        t=w * t,
        c=w * c,
        y=w * seconds,
        tt=w * t * t,
        tc=w * t * c,
        cc=w * c * c,
        ty=w * t * seconds,
        cy=w * c * seconds,
        steps=weight,
    )


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a symmetric system by elimination; None if it is singular."""
    size = len(target)
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    if min(scale) <= 0:
        return None
    rows = [
        [matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [target[i] / scale[i]]
        for i in range(size)
    ]
    for at in range(size):
        pivot = rows[at][at]
        if pivot < SINGULAR:
            return None
        for below in range(at + 1, size):
            factor = rows[below][at] / pivot
            rows[below] = [x - factor * y for x, y in zip(rows[below], rows[at], strict=True)]
    solved = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(rows[at][j] * solved[j] for j in range(at + 1, size))
        solved[at] = (rows[at][size] - rest) / rows[at][at]
    return [value / scale[i] for i, value in enumerate(solved)]

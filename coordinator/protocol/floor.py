"""How long loans may make a step. Pure.

A step that borrows takes at least as long as its loans over the link: its floor. Layers that every
rank holds whole need no loans, but take memory from KV. A step that computes for as long as its
loans take loses nothing by them: prompts beside decodes make it that large.
"""

from collections.abc import Sequence

from coordinator.protocol.policy_config import SloConfig

STEPS_MIX = 2.0
"""A floor may take this part of a goal: steps with prompts, which come between, take longer."""

SURELY_ABOVE = 1.2
"""A step that takes at least this multiple of its floor is as long as its computation."""


def pace_tokens(points: Sequence[tuple[int, int]], floor_us: int) -> int | None:
    """Return the tokens of a step that computes for as long as its loans take.

    `points` are the measured (tokens, µs) of steps that borrow, tokens ascending. The computation
    is a line through the first two points that are surely above the floor, or through one and the
    origin. None if a step of few tokens is above it already: nothing hides there, as on CPU, where
    loans and computation take turns.
    """
    above = [each for each in points if each[1] >= SURELY_ABOVE * floor_us]
    below = points[: len(points) - len(above)]
    if not floor_us or not above or not below:
        return None
    (few, few_us), (more, more_us) = [(0, 0), *above][:2] if len(above) == 1 else above[:2]
    us_per_token = (more_us - few_us) / (more - few)
    if us_per_token <= 0:
        return None
    tokens = int(more - (more_us - floor_us) / us_per_token)
    return tokens if tokens >= max(1, below[-1][0] / 2) else None


def floor_goal_s(slo: SloConfig) -> float | None:
    """Return the longest floor, in seconds, with which decodes of all tiers but batch meet goals.

    None if no such tier has a goal for the time per token.
    """
    goals_ms = [each.tpot_ms for each in (slo.interactive, slo.standard) if each.tpot_ms]
    return min(goals_ms) / 1e3 / STEPS_MIX if goals_ms else None

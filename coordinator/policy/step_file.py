"""Step times from a file, in place of those that ranks measure. Pure: the caller reads it.

A file maps each mode and width that the policy may choose to points, such as `dp1: {points: [[1,
21.6], [4096, 468]], context_us: 0.08}`. Points are (tokens of a step, milliseconds); `context_us`
is the cost of reading one token's KV, in microseconds. Those of `pp2` and `pp2tp2` are of one
stage.
"""

import re
from collections.abc import Mapping

from coordinator.model.step_line import StepLine, fit, sums_of

_WIDTH = "(?:[2-9]|[1-9][0-9])"
NAME = re.compile(f"dp1|(?:tp|sp){_WIDTH}|pp{_WIDTH}(?:tp{_WIDTH})?")


def parse_step_times(data: object) -> dict[str, StepLine]:
    """Return a line by mode and width; raises ValueError with one sentence."""
    if not isinstance(data, Mapping) or not data:
        raise ValueError("it must map names such as 'dp1' and 'tp2' to points.")
    return {_name(name): _line(str(name), each) for name, each in data.items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"'{str(name)[:40]}' is no mode with a width, such as 'dp1' or 'tp2'.")
    return name


def _line(name: str, data: object) -> StepLine:
    if not isinstance(data, Mapping) or set(data) - {"points", "context_us"}:
        raise ValueError(f"{name} must have 'points', and may have 'context_us'.")
    points, context_us = data.get("points"), data.get("context_us", 0.0)
    if not isinstance(points, list) or not all(map(_is_point, points)) or not points:
        raise ValueError(f"{name}.points must be a list of [tokens, milliseconds], both positive.")
    if not _is_number(context_us) or context_us < 0:
        raise ValueError(f"{name}.context_us must be a number of microseconds.")
    line = fit(sums_of((tokens, 0.0, ms / 1000) for tokens, ms in points))
    assert line is not None, "positive points have a line."
    return StepLine(line.base_s, line.token_s, context_us * 1e-6)


def _is_point(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(_is_number(x) and x > 0 for x in value)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

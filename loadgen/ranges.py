"""Checks of single numbers from the command line; each refusal names its option in one sentence."""

import math

from loadgen.errors import UsageError


def whole(name: str, value: int, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included."""
    if not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {value}.")
    return value


def above_zero(name: str, value: float) -> float:
    """A finite number above 0."""
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name} must be a number above 0, not {value:g}.")
    return value


def at_least_zero(name: str, value: float) -> float:
    """A finite number of 0 or more."""
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} must be a number of 0 or more, not {value:g}.")
    return value


def optional_above_zero(name: str, value: float | None) -> float | None:
    """A finite number above 0, or None where nothing was given."""
    return None if value is None else above_zero(name, value)

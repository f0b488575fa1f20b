"""Checks of single numbers from the command line; each refusal names its option in one sentence."""

import math

from loadgen.errors import UsageError


def whole(name: str, value: int, low: int, high: int) -> int:
    """Return `value` if it is from `low` to `high`, both included; else raise UsageError."""
    if not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {value}.")
    return value


def above_zero(name: str, value: float) -> float:
    """Return `value` if it is finite and above 0; else raise UsageError."""
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name} must be a number above 0, not {value:g}.")
    return value


def at_least_zero(name: str, value: float) -> float:
    """Return `value` if it is finite and at least 0; else raise UsageError."""
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} must be a number of 0 or more, not {value:g}.")
    return value


def optional_above_zero(name: str, value: float | None) -> float | None:
    """Return None, or `value` if it is finite and above 0; else raise UsageError."""
    return None if value is None else above_zero(name, value)

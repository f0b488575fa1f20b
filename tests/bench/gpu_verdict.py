"""Targets beside what was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target beside what was measured; `met` is None where nothing was."""

    target: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        """How a table says it."""
        return {True: "met", False: "**missed**", None: "not measured"}[self.met]


def at_most(target: str, value: float | None, limit: float, shown: str = ".3f") -> Verdict:
    """Met where the value does not exceed the limit; the target's words name it."""
    return _verdict(target, value, shown, value is not None and value <= limit)


def at_least(target: str, value: float | None, limit: float, shown: str = ".3f") -> Verdict:
    """Met where the value reaches the limit; the target's words name it."""
    return _verdict(target, value, shown, value is not None and value >= limit)


def _verdict(target: str, value: float | None, shown: str, met: bool) -> Verdict:
    if value is None:
        return Verdict(target, "–", None)
    return Verdict(target, format(value, shown), met)

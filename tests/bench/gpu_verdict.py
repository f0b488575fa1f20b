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


def at_most(target: str, value: float | None, limit: float) -> Verdict:
    """Met where the value does not exceed the limit."""
    text = f"{target}: at most {limit:g}"
    return Verdict(text, "–", None) if value is None else _of(text, value, value <= limit)


def at_least(target: str, value: float | None, limit: float) -> Verdict:
    """Met where the value reaches the limit."""
    text = f"{target}: at least {limit:g}"
    return Verdict(text, "–", None) if value is None else _of(text, value, value >= limit)


def _of(target: str, value: float, met: bool) -> Verdict:
    return Verdict(target, f"{value:.3f}", met)

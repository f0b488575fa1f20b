"""Sums over the steps that a leader served, for a fit of their times. Pure.

A device that says when its steps end is believed. The host finds that out later: it may launch the
next step meanwhile. Without such a device, a step lasts from its launch, or from the end of the
step before it if that is later, to the moment at which the host finds it over. A step that takes a
multiple or a fraction of the median of its size is left out: it hit something else, such as a page
fault or a compile. Steps that took no longer than their loans are counted apart. A step of a
pipeline group counts with the time of one stage: by the device's clock, or as long as it takes from
the end of the step before it, if all stages have work.
"""

from dataclasses import dataclass
from typing import Protocol

from comm_pool.layout import Mode, StepMode
from comm_pool.mixed import Staged
from coordinator.protocol.messages.steps import AT_FLOOR, ServedSteps, StepSums

OUTLIER = 3.0
"""Steps that take at least this multiple of their size's median, or at most its inverse, are left
out.

The fit weighs relative errors, so one step that looks a hundred times too short would count as much
as ten thousand others.
"""

ADAPTATION = 1.05
"""Factor by which one step moves its size's median."""

KNOWN_FROM = 8
"""Steps of a size before its median is trusted; also the outliers in a row that end filtering."""

TOKENS_UNIT, CONTEXT_UNIT = 1e3, 1e6


class PlannedStep(Protocol):
    """What the log needs from a step's plan."""

    @property
    def mode(self) -> StepMode:
        """How the group computes it."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""

    @property
    def context(self) -> int:
        """Tokens before those, whose KV the step reads."""


@dataclass(slots=True)
class _Median:
    """A running median that adapts to new values."""

    seconds: float
    count: int = 0
    odd: int = 0
    """Outliers in a row; many mean that the rank is slow or fast now, so they are no outliers."""

    def learn(self, seconds: float) -> bool:
        """Move the median towards a value; return whether the value is no outlier."""
        self.count += 1
        self.seconds *= ADAPTATION if seconds > self.seconds else 1 / ADAPTATION
        is_usual = self.seconds / OUTLIER < seconds < OUTLIER * self.seconds
        self.odd = 0 if is_usual else self.odd + 1
        return self.count < KNOWN_FROM or not 0 < self.odd < KNOWN_FROM


def _size_of(plan: PlannedStep, width: int) -> tuple[StepMode, int, int]:
    """Return the class of steps that take about equally long."""
    return plan.mode, width, plan.tokens.bit_length()


def _kind_of(mode: StepMode) -> tuple[Mode, int] | None:
    """Return the mode of the groups whose steps are computed so, and the parts of each stage.

    None for mixed ones.
    """
    if isinstance(mode, Staged):
        return Mode.PP, mode.tp
    return (mode, 1) if isinstance(mode, Mode) else None


class StepLog:
    """Sums since the last `take`, by mode, width and whether the step was at its floor."""

    __slots__ = ("_last_end_ns", "_medians", "_sums")

    def __init__(self) -> None:
        self._sums: dict[tuple[Mode, int, int, bool], list[float]] = {}
        self._medians: dict[tuple[StepMode, int, int], _Median] = {}
        self._last_end_ns = 0

    def ended(
        self,
        plan: PlannedStep,
        width: int,
        launched_ns: int,
        end_ns: int,
        floor_us: int = 0,
        device_s: float | None = None,
        busy: float = 1.0,
    ) -> None:
        """Count a step of a group; both times are of the host's clock.

        Its loans alone take `floor_us`; 0 if it borrows nothing. `device_s` is how long it took by
        the device's clock in seconds, where that is known. `busy` is the share of a pipeline
        group's stages that had a step meanwhile.
        """
        mode, tokens = plan.mode, plan.tokens
        seconds = (end_ns - max(launched_ns, self._last_end_ns)) * 1e-9 * busy
        if device_s is not None:
            seconds = device_s
        self._last_end_ns = end_ns
        # The policy does not weigh layouts of mixed groups.
        kind = _kind_of(mode)
        if seconds <= 0 or not tokens or kind is None:
            return
        median = self._medians.setdefault(_size_of(plan, width), _Median(seconds))
        if not median.learn(seconds):
            return
        is_at_floor = seconds <= AT_FLOOR * floor_us * 1e-6
        w = 1 / (seconds * seconds)
        t, c = tokens / TOKENS_UNIT, plan.context / CONTEXT_UNIT
        found = [w, w * t, w * c, w * seconds, w * t * t, w * t * c, w * c * c]
        found += [w * t * seconds, w * c * seconds, 1.0]
        sums = self._sums.setdefault((*kind, width, is_at_floor), [0.0] * len(found))
        for index, value in enumerate(found):
            sums[index] += value

    def usual_s(self, plan: PlannedStep, width: int) -> float | None:
        """Return the median time of such steps in seconds; None if unknown."""
        found = self._medians.get(_size_of(plan, width))
        return found.seconds if found is not None else None

    def take(self) -> tuple[ServedSteps, ...]:
        """Return the sums since the last call."""
        taken, self._sums = {key: StepSums(*sums) for key, sums in self._sums.items()}, {}
        nothing = StepSums()
        return tuple(
            ServedSteps(
                mode,
                width,
                taken.get((mode, tp, width, False), nothing),
                taken.get((mode, tp, width, True), nothing),
                tp,
            )
            for mode, tp, width in dict.fromkeys(key[:3] for key in taken)
        )

"""What the policy is to reach and how soon it may change its mind; see `PolicyConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.model.step_line import StepLine
from coordinator.protocol.terms import Tier


@dataclass(frozen=True, slots=True)
class TierGoal:
    """What a request of a tier is to see; None is no goal, then throughput counts.

    `ttft_s` is the time to the first token, `tpot_s` the mean time per token behind it. `weight` is
    what one request that sees both is worth. Where `width_min` is more than 1, a layout without
    such a group is not wanted while tasks of the tier are there.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    weight: float = 1.0
    width_min: int = 1


DEFAULT_GOALS = {
    Tier.INTERACTIVE: TierGoal(0.5, 0.05, weight=2.0),
    Tier.STANDARD: TierGoal(2.0, 0.1),
    # Batch work that waits is not lost.
    Tier.BATCH: TierGoal(weight=0.25),
}


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Times in milliseconds; shares are parts of what is compared."""

    goals: Mapping[Tier, TierGoal] = field(default_factory=lambda: dict(DEFAULT_GOALS))
    decide_every_ms: int = 250
    stay_ms: int = 3_000
    """A layout is kept for at least so long, and not left for the one before it sooner."""
    settle_ms: int = 1_500
    """A layout that is no better for the goals must look better for so long."""
    caution_ms: int = 60_000
    """A layout that was taken for its speed, and had to be left for the goals soon, is not taken
    for speed again for so long; twice as long after another time, up to ten times."""
    horizon_ms: int = 8_000
    """How far ahead is looked."""
    gain_min: float = 0.04
    """A switch must raise the predicted goodput by such a part of it, after its own cost."""
    latency_gain_min: float = 0.1
    """Among layouts that are as good for the goals, one must be so much faster."""
    switches_per_minute_max: int = 12
    pin_ms: int = 600_000
    """An operator's layout is left alone for so long; 0 pins nothing."""


@dataclass(frozen=True, slots=True)
class PolicyStart:
    """What the policy of a cell is told at its start; `step_times` replace measured ones."""

    settings: PolicySettings
    widths: tuple[int, ...]
    step_times: Mapping[str, StepLine] = field(default_factory=dict)

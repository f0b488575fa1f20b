"""Goals of the policy, and limits on how soon it may change its mind; see `PolicyConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.model.step_line import StepLine
from coordinator.protocol.terms import Tier


@dataclass(frozen=True, slots=True)
class TierGoal:
    """Goals for a request of a tier; None is no goal, then throughput counts.

    `ttft_s` is the time to the first token, `tpot_s` the mean time per token after it. `weight` is
    the worth of one request that meets both. With `width_min` above 1, a layout without such a
    group is refused while the tier has tasks.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    weight: float = 1.0
    width_min: int = 1


DEFAULT_GOALS = {
    Tier.INTERACTIVE: TierGoal(0.5, 0.03, weight=2.0),
    Tier.STANDARD: TierGoal(2.0, 0.1),
    # Batch work that waits is not lost.
    Tier.BATCH: TierGoal(weight=0.25),
}


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Times in milliseconds; shares are relative to the compared value."""

    goals: Mapping[Tier, TierGoal] = field(default_factory=lambda: dict(DEFAULT_GOALS))
    decide_every_ms: int = 250
    stay_ms: int = 3_000
    """Least time before a layout is left, and before the previous one may return."""
    settle_ms: int = 1_000
    """Least time for which a layout that is no better for the goals must look better."""
    caution_ms: int = 60_000
    """Time during which a layout that was chosen for its speed, and soon left for the goals, is not
    chosen for speed again; doubled at each repetition, at most ten times as long."""
    horizon_ms: int = 8_000
    """The length of the forecast."""
    gain_min: float = 0.04
    """Least relative gain in predicted goodput of a switch, net of its cost."""
    latency_gain_min: float = 0.1
    """Least relative speed-up for a change between layouts that are as good for the goals."""
    switches_per_minute_max: int = 12
    pin_ms: int = 600_000
    """How long an operator's layout stays pinned; 0 pins nothing."""
    alternates: bool = True
    """Whether batch work alone may alternate between two layouts."""


@dataclass(frozen=True, slots=True)
class PolicyStart:
    """The start-up input of a cell's policy; `step_times` replace measured ones."""

    settings: PolicySettings
    widths: tuple[int, ...]
    step_times: Mapping[str, StepLine] = field(default_factory=dict)

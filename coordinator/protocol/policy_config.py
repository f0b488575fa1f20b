"""Configuration of objectives and policy: goals of the tiers, and how soon layouts may change."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SloTarget(_Frozen):
    """What requests of a tier are to see; what is left out (null) does not count."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """Longest time to the first token."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Longest mean time per output token of one stream."""


class SloConfig(_Frozen):
    """The objectives of all tiers: metrics judge by them, and the adaptive policy aims at them."""

    interactive: SloTarget = SloTarget(ttft_ms=500, tpot_ms=50)
    standard: SloTarget = SloTarget(ttft_ms=2_000, tpot_ms=100)
    batch: SloTarget = SloTarget()


class TierConfig(_Frozen):
    """What a tier is to the policy."""

    weight: float = Field(default=1.0, gt=0)
    """What a request that sees its objectives is worth, beside one of another tier."""
    width_min: int = Field(default=1, ge=1)
    """Narrowest group for the tier's requests; needs a layout that has one."""


class PolicyConfig(_Frozen):
    """Who chooses the layout. With `fixed` only an operator does."""

    name: Literal["fixed", "adaptive"] = "fixed"
    interactive: TierConfig = TierConfig(weight=2.0)
    standard: TierConfig = TierConfig()
    batch: TierConfig = TierConfig(weight=0.25)
    decide_every_ms: int = Field(default=250, ge=10)
    """How often the load is looked at."""
    stay_ms: int = Field(default=3_000, ge=0)
    """A layout is kept for so long; a third of it if a switch would gain more than a quarter."""
    settle_ms: int = Field(default=1_500, ge=0)
    """Another layout has to look a little better for so long."""
    caution_ms: int = Field(default=60_000, ge=0)
    """A wide layout that had to be left soon is not taken for its speed again for so long; twice as
    long after another time, up to ten times."""
    horizon_ms: int = Field(default=8_000, ge=100)
    """How far ahead is looked."""
    switches_per_minute_max: int = Field(default=12, ge=1)
    pin_ms: int = Field(default=600_000, ge=0)
    """The layout of `aileron switch` is left alone for so long; 0 lets the policy go on at once."""
    step_times: str = ""
    """YAML file of step times to predict with, instead of those that ranks measure."""
    observation_log: str = ""
    """File to write what the policy sees to, for `aileron replay`; empty writes none."""
    observation_log_bytes_max: int = Field(default=64 * 1024**2, ge=4_096)
    """A log of this size is moved to `<file>.1` and begun anew."""
